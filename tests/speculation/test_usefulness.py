"""Drafting that costs something, on a virtual clock: little is lost where it brings nothing, nothing where it does."""

from __future__ import annotations

import itertools
import random

import pytest

from moeflow.core.batch import Batch, BatchEntry
from moeflow.core.token_tree import NO_TREE
from moeflow.speculation.counts import MAX_DEPTH
from moeflow.speculation.speculation import Speculation
from moeflow.speculation.speculator import Draft
from moeflow.speculation.usefulness import ComputedDraft, Usefulness
from tests.speculation.test_governor import make_request


class Drafter:
    """Takes its time for every token that it drafts; each is right with the same chance."""

    def __init__(self, name: str, token_s: float, right: float, first_token: int) -> None:
        self.name, self.token_s, self.right, self.first_token = name, token_s, right, first_token
        self.depths: list[int] = []
        self.machine: Machine | None = None

    def propose(self, requests, max_depth):
        self.depths.append(max_depth)
        self.machine.now_s += self.token_s * max_depth
        tokens = range(self.first_token, self.first_token + max_depth)
        return [[Draft(tuple(tokens), (self.first_token,) * max_depth)] for _ in requests]

    def believed(self, grade):
        return 0.5

    def forget(self, request):
        pass


class Machine:
    """Decodes of one request on a virtual clock; a pass takes a second, and each drafted token in it 0.1 s more."""

    def __init__(self, *drafters: Drafter) -> None:
        self.rng, self.now_s, self.pass_s = random.Random(0), 0.0, 1.0
        self.drafters = drafters
        for drafter in drafters:
            drafter.machine = self
        self.speculation = Speculation(drafters, clock=lambda: self.now_s)
        self.request = make_request(max_tokens=1_000_000)

    def run(self, num_tokens: int) -> float:
        """Return tokens a second, plain decoding having one."""
        start_s, done = self.now_s, 0
        while done < num_tokens:
            tree = self.speculation.trees([self.request], 64).get(self.request, NO_TREE)
            kept = self._kept(tree)
            seconds = (self.pass_s + 0.1 * len(tree)) * self.rng.uniform(0.95, 1.05)
            self.now_s += seconds
            entry = BatchEntry(self.request, 1, 1, (), samples=True, tree=tree)
            self.speculation.note(Batch((entry,)), {self.request: kept}, seconds)
            done += 1 + len(kept)
        return done / (self.now_s - start_s)

    def _kept(self, tree) -> list[int]:
        """Return one drafter's first tokens, as far as its luck goes."""
        for drafter in self.drafters:
            chain = [
                tree.token_ids.index(t)
                for t in range(drafter.first_token, drafter.first_token + 99)
                if t in tree.token_ids
            ]
            kept = list(itertools.takewhile(lambda node, of=drafter: self.rng.random() < of.right, chain))
            if kept:
                return kept
        return []


@pytest.mark.parametrize("token_s", [0.02, 0.3, 2.0])
def test_useless_drafts_cost_what_a_trial_may(token_s):
    machine = Machine(Drafter("useless", token_s, 0.01, first_token=0))
    assert machine.run(31) > 0.98  # nothing is tried
    few = 2 * (MAX_DEPTH * token_s + 1.6) / 2000  # the time of two drafts cannot be known before
    assert machine.run(2000) > 0.99 - few
    assert machine.run(3000) > 0.99


def test_useful_drafts_are_never_left_out():
    drafter = Drafter("useful", 0.1, 0.9, first_token=0)
    machine = Machine(drafter)
    assert machine.run(300) > 1.2
    rate = machine.run(1000)
    assert rate > 1.8  # four tokens a draft: 4.1 tokens in 1 + 4 * (0.1 + 0.1) s
    asked, passes = len(drafter.depths), machine.speculation.counts.passes
    machine.run(1000)
    assert len(drafter.depths) - asked == machine.speculation.counts.passes - passes


def test_no_more_is_drafted_than_is_worth_computing():
    drafter = Drafter("short of breath", 0.05, 0.4, first_token=0)
    machine = Machine(drafter)
    machine.run(3000)
    assert max(drafter.depths[-100:]) <= 4
    drafter.right = 0.95
    machine.run(2000)
    assert max(drafter.depths[-100:]) > 8


def test_drafts_that_become_useful_are_found_again_and_again_left_alone():
    drafter = Drafter("moody", 0.1, 0.01, first_token=0)
    machine = Machine(drafter)
    machine.run(1500)
    drafter.right = 0.95
    machine.run(2000)
    assert machine.run(1000) > 1.7
    drafter.right = 0.01
    machine.run(1500)
    assert machine.run(2000) > 0.95


def test_of_two_the_useless_one_rests():
    useful, useless = Drafter("useful", 0.05, 0.9, first_token=0), Drafter("useless", 0.5, 0.01, first_token=100)
    machine = Machine(useful, useless)
    machine.run(1500)
    before = len(useful.depths), len(useless.depths)
    machine.run(12000)  # many trials, of some passes each
    assert len(useless.depths) - before[1] < 0.05 * (len(useful.depths) - before[0])


def test_what_two_drafted_counts_for_the_one_with_the_larger_gain(monkeypatch):
    use, noted = Usefulness(["a", "b", "c"]), {}
    use.trials["a"].note(0.5)
    for name, trial in use.trials.items():
        monkeypatch.setattr(trial, "note", lambda gain, name=name: noted.update({name: gain}))
    both, one = frozenset({"a", "b"}), frozenset({"a"})
    drafts = [
        ComputedDraft(both, 1, is_kept=True),
        ComputedDraft(one, 2, is_kept=True),
        ComputedDraft(one, 3, is_kept=False),
    ]
    use.note({"a": 0.5, "b": 0.25}, drafts, num_requests=2, plain_s=2.0, extra_s=0.6)
    worth_both, worth_kept, worth_wrong = 0.5 - 0.1, 0.5 - 0.1, -0.1
    assert noted["a"] == pytest.approx(worth_both + worth_kept + worth_wrong - 0.25)
    assert noted["b"] == pytest.approx(-0.125)
    assert noted["c"] is None
    assert use.depth("a") > use.depth("c") - 1


def test_what_drafts_are_compared_with_stays_true():
    """Passes have become faster, so that drafts are of no use any more."""
    drafter = Drafter("useful", 0.1, 0.5, first_token=0)
    machine = Machine(drafter)
    machine.run(3000)
    assert not machine.speculation.usefulness.is_tried("useful")
    machine.pass_s = 0.2
    machine.run(3000)
    before = machine.now_s
    machine.run(2000)
    assert machine.now_s - before < 2000 * 0.2 * 1.05


def test_the_counts_tell_who_rests_what_was_right_and_how_long_it_took():
    useful, useless = Drafter("useful", 0.05, 0.9, first_token=0), Drafter("useless", 0.5, 0.01, first_token=100)
    machine = Machine(useful, useless)
    machine.run(1500)
    counts = machine.speculation.counts
    found = {name: one.is_resting for name, one in counts.speculators.items()}
    assert found == {"useful": False, "useless": True}
    assert counts.kept == sum(sum(one.kept) for one in counts.speculators.values())
    assert counts.drafted == sum(sum(one.drafted) for one in counts.speculators.values())  # no token is both's
    assert counts.kept == sum(number * trees for number, trees in enumerate(counts.trees))
    for drafter in (useful, useless):
        spent_s = drafter.token_s * sum(drafter.depths)
        assert counts.speculators[drafter.name].draft_s == pytest.approx(spent_s)


def test_who_fails_rests():
    broken, other = Drafter("broken", 0.1, 0.5, first_token=0), Drafter("other", 0.1, 0.9, first_token=100)

    def fail(requests, max_depth):
        raise RuntimeError("out of memory")

    broken.propose = fail
    machine = Machine(broken, other)
    machine.run(1000)
    counts = machine.speculation.counts.speculators
    assert (counts["broken"].is_resting, counts["other"].is_resting) == (True, False)
