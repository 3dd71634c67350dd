"""The governor on a virtual clock: it takes what brings most tokens a second, and loses little where nothing does."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.core.batch import Batch, BatchEntry
from moeflow.core.request import Request
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.token_tree import MAX_TREE_TOKENS
from moeflow.speculation.acceptance import Acceptance
from moeflow.speculation.draft_tree import merge, tree_of
from moeflow.speculation.governor import Governor
from moeflow.speculation.pass_times import FIRST_SHARE, PassTimes
from moeflow.speculation.speculation import Speculation
from moeflow.speculation.speculator import Draft


def make_request(name="r", max_tokens=10_000):
    return Request(name, [1], SamplingParams(), max_tokens, output_token_ids=[2], num_computed_tokens=1)


def draft(*token_ids, grades=None):
    return Draft(tuple(token_ids), grades or tuple(range(len(token_ids))))


drafts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=4)


@given(found=drafts, chances=st.lists(st.floats(0.05, 0.95), min_size=8, max_size=8))
def test_merged_drafts_have_each_beginning_once_with_its_best_chance(found, chances):
    root = merge([(str(i), draft(*one)) for i, one in enumerate(found)], 9, lambda name, grade: chances[int(name)])
    expected: dict[tuple[int, ...], float] = {}
    for length in range(1, 5):  # by level: a token's chance is its own times that of the best way to its parent
        for i, one in enumerate(found):
            text = tuple(one[:length])
            if len(text) == length:
                before = expected.get(text[:-1], 1.0)
                expected[text] = max(expected.get(text, 0.0), before * chances[i])
    seen = {}
    left = [((token.token_id,), token) for token in root.children.values()]
    while left:
        text, token = left.pop()
        seen[text] = token.chance
        left += [((*text, child.token_id), child) for child in token.children.values()]
    assert seen.keys() == expected.keys()
    for text, chance in seen.items():
        assert chance <= expected[text] * (1 + 1e-9)


def test_the_best_tokens_a_second_are_chosen():
    """Against all numbers of the likeliest tokens."""
    rng = random.Random(0)
    for _ in range(50):
        governor = Governor()
        cost = {rows: 1 + rng.random() * (rows - 1) for rows in range(1, 30)}
        for rows, seconds in cost.items():
            governor.times.note(rows, seconds)
        grades = [rng.uniform(0.2, 0.99) for _ in range(6)]
        root = merge(
            [("a", draft(*range(6))), ("b", draft(0, 7, 8))],
            9,
            lambda name, grade, of=grades: of[grade] * (name == "a" or 0.5),
        )
        request = make_request()
        chosen = governor.choose({request: root}, 1, 20)
        every = sorted(_all(root), key=lambda token: -token.chance)
        rates = [
            (1 + sum(token.chance for token in every[:number])) / cost[1 + number] for number in range(len(every) + 1)
        ]
        best = max(rates)
        assert rates[len(chosen)] == pytest.approx(best) or (not chosen and best <= 1.02 * rates[0])
        tree, nodes = tree_of([token for _, token in chosen])
        assert [node.token_id for node in nodes] == list(tree.token_ids)


def _all(root):
    return [token for child in root.children.values() for token in [child, *_all(child)]]


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), max_tokens=st.integers(0, 80))
def test_no_more_tokens_than_there_is_room_for(seed, max_tokens):
    rng = random.Random(seed)
    governor = Governor()
    governor.times.note(1, 1.0)
    governor.times.note(200, 1.01)  # rows cost nothing
    requests = [make_request(str(i)) for i in range(3)]
    roots = {
        request: merge([("a", draft(*[rng.randrange(9) for _ in range(40)])) for _ in range(4)], 40, lambda *_: 0.99)
        for request in requests
    }
    chosen = governor.choose(roots, 3, max_tokens)
    assert len(chosen) <= max_tokens
    for request in requests:
        tokens = [token for of, token in chosen if of is request]
        assert len(tokens) <= MAX_TREE_TOKENS
        for place, token in enumerate(tokens):
            assert token.parent.parent is None or token.parent in tokens[:place]


class Machine:
    """Decodes of one request on a virtual clock; a draft is right with a chance that depends on its grade."""

    def __init__(self, right: list[float], row_s: float, seed: int = 0) -> None:
        self.right, self.row_s, self.rng = right, row_s, random.Random(seed)
        self.now_s = 0.0
        self.speculation = Speculation([self], clock=lambda: self.now_s)
        self.request = make_request()

    name = "made up"

    def propose(self, requests, max_depth):
        return [[draft(*range(len(self.right)))] for _ in requests]

    def believed(self, grade):
        return 0.5

    def forget(self, request):
        pass

    def run(self, num_tokens: int) -> float:
        """Return tokens a second, plain decoding having one."""
        start_s, done = self.now_s, 0
        while done < num_tokens:
            trees = self.speculation.trees([self.request], 64)
            entry = BatchEntry(self.request, 1, 1, (), samples=True)
            if self.request in trees:
                entry = BatchEntry(self.request, 1, 1, (), samples=True, tree=trees[self.request])
            kept = list(itertools.takewhile(lambda node: self.rng.random() < self.right[node], range(len(entry.tree))))
            seconds = (1 + self.row_s * len(entry.tree)) * self.rng.uniform(0.95, 1.05)
            self.now_s += seconds
            self.speculation.note(Batch((entry,)), {self.request: kept}, seconds)
            done += 1 + len(kept)
        return done / (self.now_s - start_s)


def best_rate(right: list[float], row_s: float) -> float:
    rates, expected, chance = [1.0], 1.0, 1.0
    for number, one in enumerate(right, 1):
        chance *= one
        expected += chance
        rates.append(expected / (1 + row_s * number))
    return max(rates)


@pytest.mark.parametrize("row_s", [0.01, 0.2, 0.6])
@pytest.mark.parametrize("right", [[0.9, 0.9, 0.8, 0.7, 0.6, 0.5], [0.5, 0.4, 0.3], [0.8] * 12])
def test_it_comes_near_the_best_fixed_depth(right, row_s):
    machine = Machine(right, row_s)
    machine.run(300)  # learns
    assert machine.run(3000) > 0.9 * best_rate(right, row_s)


@pytest.mark.parametrize("row_s", [0.05, 0.5, 1.0])
def test_useless_drafts_cost_next_to_nothing(row_s):
    machine = Machine([0.01, 0.01, 0.01], row_s)
    assert machine.run(1000) > 0.97
    assert machine.run(3000) > 0.985


def test_drafts_that_become_good_are_found_again():
    machine = Machine([0.01] * 6, 0.1)
    machine.run(1500)
    machine.right[:] = [0.95] * 6
    machine.run(3000)
    assert machine.run(2000) > 0.9 * best_rate([0.95] * 6, 0.1)


def test_passes_between_known_sizes_take_what_lies_between():
    times = PassTimes()
    assert times.seconds(3) is None
    times.note(2, 1.0)
    assert times.seconds(1) == times.seconds(2) == 1.0
    assert times.seconds(4) > 1.0
    times.note(10, 3.0)
    assert times.seconds(6) == pytest.approx(2.0)
    assert times.seconds(14) == pytest.approx(3.0 + 4 * FIRST_SHARE * 3.0 / 10)  # untried: hoped to cost no more
    flat = PassTimes()
    flat.note(2, 1.0)
    flat.note(10, 1.08)
    assert flat.seconds(14) == pytest.approx(1.12)  # rows were measured to cost less than that
    for _ in range(100):
        times.note(10, 5.0)
    assert times.seconds(10) == pytest.approx(5.0, rel=0.01)
    times.note(10, 500.0)  # something else ran meanwhile
    assert times.seconds(10) < 7.0


def test_what_grades_are_worth_is_counted():
    acceptance, rng = Acceptance({"a": lambda grade: 0.5, "b": lambda grade: 0.9}), random.Random(0)
    assert acceptance.chance("new", "b", 2) == 0.9
    for _ in range(2000):
        acceptance.note("lucky", "a", 1, is_right=rng.random() < 0.9)
        acceptance.note("unlucky", "a", 1, is_right=rng.random() < 0.3)
        acceptance.note("lucky", "b", 2, is_right=rng.random() < 0.1)
    acceptance.forget("lucky")
    assert acceptance.chance("new", "b", 2) == pytest.approx(0.1, abs=0.05)
    assert 0.4 < acceptance.chance("new", "a", 1) < 0.8
    assert acceptance.chance("unlucky", "a", 1) < acceptance.chance("new", "a", 1)
