"""The cost of drafted tokens by the experts they need, against all trees there are."""

from __future__ import annotations

import itertools
import random

from moeflow.core.batch import Batch, BatchEntry
from moeflow.core.request import Request
from moeflow.core.sampling_params import SamplingParams
from moeflow.speculation.draft_tree import DraftNode, merge
from moeflow.speculation.expert_needs import ExpertNeeds, UsualNeeds
from moeflow.speculation.governor import LEAST_GAIN, LEAST_PASSES, Governor
from moeflow.speculation.speculation import Speculation
from moeflow.speculation.speculator import Draft

BASE_S, EACH_S, READ_S = 2.0, 0.1, 1.0


def make_request(name="r"):
    return Request(name, [1], SamplingParams(), 100, output_token_ids=[2], num_computed_tokens=1)


def taught(rng: random.Random, base_s=BASE_S, each_s=EACH_S, read_s=READ_S) -> Governor:
    """Return a governor that has seen passes which take exactly so long."""
    governor = Governor()
    governor.times.note(1, 1.0)
    for _ in range(2 * LEAST_PASSES):
        num_experts, num_absent = rng.randrange(5, 60), rng.randrange(5)
        seconds = base_s + each_s * num_experts + read_s * num_absent
        governor.expert_times.observe(seconds, 1, num_experts, num_absent)
    return governor


def test_merged_drafts_keep_what_is_known():
    drafts = [
        ("a", Draft((1, 2), (0, 0), (frozenset({9}), frozenset({4})))),
        ("b", Draft((1, 2, 3), (0, 0, 0))),
        ("c", Draft((1, 5), (0, 0), (frozenset({9}), frozenset({4}), frozenset({6})))),
    ]
    for order in itertools.permutations(drafts):
        root = merge(order, 9, lambda *_: 0.5)
        one = root.children[1]
        assert (root.experts, one.experts) == ({9}, {4})
        assert one.children[5].experts == {6}
        assert one.children[2].experts == one.children[2].children[3].experts == frozenset()
        assert {token.token_id for token in root.all()} == {-1, 1, 2, 3, 5}


def test_what_a_token_adds_is_what_the_others_do_not_need():
    usual = UsualNeeds()
    needs = ExpertNeeds([frozenset({1, 2})], frozenset({2, 3, 4}), usual)
    assert (needs.num_experts, needs.num_absent) == (2, 1)
    token = DraftNode(5, None, experts=frozenset({2, 3, 7}))
    added = needs.added(token)
    assert (added.experts, added.absent) == (2, 1)
    needs.add(token)
    assert (needs.num_experts, needs.num_absent) == (4, 2)
    assert needs.added(token).experts == 0
    needs.add(DraftNode(6, None))  # unknown: as much as the only known one
    assert (needs.num_experts, needs.num_absent) == (6, 3)


def random_root(rng: random.Random, num_tokens: int) -> DraftNode:
    """Return a tree whose tokens need four of twelve experts each."""

    def some() -> frozenset[int]:
        return frozenset(rng.sample(range(12), 4))

    root = DraftNode(-1, None, chance=1.0, experts=some())
    tokens = [root]
    for number in range(num_tokens):
        parent = rng.choice(tokens)
        token = DraftNode(number, parent, chance=parent.chance * rng.uniform(0.2, 0.95), experts=some())
        parent.children[number] = token
        tokens.append(token)
    return root


def rate(root: DraftNode, chosen, absent) -> float:
    experts = root.experts.union(*[token.experts for token in chosen])
    seconds = BASE_S + EACH_S * len(experts) + READ_S * len(experts & absent)
    return (1 + sum(token.chance for token in chosen)) / seconds


def best_rate(root: DraftNode, absent) -> float:
    tokens = [token for token in root.all() if token is not root]
    return max(
        rate(root, some, absent)
        for number in range(len(tokens) + 1)
        for some in itertools.combinations(tokens, number)
        if all(token.parent is root or token.parent in some for token in some)
    )


def test_choices_come_near_the_best_of_all_trees():
    rng = random.Random(1)
    found, best = [], []
    for _ in range(150):
        root = random_root(rng, 7)
        absent = frozenset(rng.sample(range(12), rng.randrange(6)))
        chosen = [token for _, token in taught(rng).choose({make_request(): root}, 1, 20, absent.intersection)]
        for place, token in enumerate(chosen):
            assert token.parent is root or token.parent in chosen[:place]
        found.append(rate(root, chosen, absent))
        best.append(best_rate(root, absent))
        assert found[-1] >= rate(root, (), absent) * 0.999
        assert found[-1] >= 0.8 * best[-1] / (1 + LEAST_GAIN)
    assert sum(found) >= 0.97 * sum(best)


def test_a_branch_whose_experts_have_to_be_read_is_cut():
    """Of two tokens of one chance that one is taken whose experts are there; of a less likely one likewise."""
    for chances in ((0.6, 0.6), (0.6, 0.55), (0.4, 0.6)):
        root = DraftNode(-1, None, chance=1.0, experts=frozenset(range(8)))
        for number, chance in enumerate(chances):
            experts = frozenset(range(8)) if number == 0 else frozenset(range(20, 28))
            root.children[number] = DraftNode(number, root, chance=chance, experts=experts)
        absent = frozenset(range(20, 28))
        chosen = taught(random.Random(0)).choose({make_request(): root}, 1, 20, absent.intersection)
        assert [token.token_id for _, token in chosen] == [0]
        both = taught(random.Random(0)).choose({make_request(): root}, 1, 20, frozenset[int]().intersection)
        assert len(both) == 2


def test_without_what_is_needed_rows_decide():
    """If the experts of one request are unknown, or too few passes were seen."""
    known = DraftNode(-1, None, chance=1.0, experts=frozenset({1}))
    known.children[0] = DraftNode(0, known, chance=0.9, experts=frozenset({50}))
    unknown = DraftNode(-1, None, chance=1.0)
    unknown.children[0] = DraftNode(0, unknown, chance=0.9)
    for roots in ([known, unknown], [known]):
        governor = taught(random.Random(0), read_s=100.0) if len(roots) == 2 else Governor()
        for rows in range(1, 5):
            governor.times.note(rows, 1.0)  # rows cost nothing
        requests = {make_request(str(number)): root for number, root in enumerate(roots)}
        assert len(governor.choose(requests, len(roots), 20, frozenset({50}).intersection)) == len(roots)


class Streamed:
    """Decodes whose experts come from disk: to draft takes a tenth of a second, and saves some reading."""

    name = "made up"

    def __init__(self, saved_s: float) -> None:
        self.now_s, self.saved_s, self.asked = 0.0, saved_s, 0
        self.speculation = Speculation([self], clock=lambda: self.now_s, absent_of=lambda experts: experts)

    def propose(self, requests, max_depth):
        self.now_s += 0.1
        self.asked += 1
        return [[] for _ in requests]  # it only gives the experts to read

    def believed(self, grade):
        return 0.5

    def forget(self, request):
        pass

    def run(self, num_passes: int) -> float:
        """Return the share of passes before which it was asked."""
        request, before = make_request(), self.asked
        for _ in range(num_passes):
            asked = self.asked
            self.speculation.trees([request], 64)
            seconds = 1.0 - (self.saved_s if self.asked > asked else 0.0)
            self.now_s += seconds
            self.speculation.note(Batch((BatchEntry(request, 1, 1, (), samples=True),)), {}, seconds)
        return (self.asked - before) / num_passes


def test_who_saves_reading_is_asked_though_none_of_its_drafts_is_right():
    streamed = Streamed(saved_s=0.3)
    assert streamed.run(1000) > 0.9
    assert streamed.run(33) < 1.0, "what it is compared with is measured now and then"


def test_who_saves_nothing_rests():
    streamed = Streamed(saved_s=0.0)
    streamed.run(1000)
    assert streamed.run(1000) < 0.25
