"""Chooses the drafted tokens that maximize tokens per second, down to none.

With each further drafted token a pass takes longer (`pass_times.py`) and brings, in the mean, as many tokens more as
the chance of that token. The likeliest tokens of all requests are added one after another; the number with the most
tokens a second is taken. So trees are cut where a branch's experts cost more than its chance brings, at any number of
requests.
If speculators predict the experts of each token, a token costs as much as these: nothing if the pass needs them anyway,
most if they must be read from disk. `base + each * experts + read * absent` is fitted to passes.
Where nothing pays, a token is tried once passes without drafts have saved its time: its chances may have improved.
(Cascade, 2506.20675, has a utility of this kind for chains of one length; 2605.00342 for trees.)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from itertools import count
from typing import Final

from moeflow.core.request import Request
from moeflow.core.running_fit import RunningFit
from moeflow.core.token_tree import MAX_TREE_TOKENS
from moeflow.core.trial import SHARE
from moeflow.speculation.draft_tree import DraftNode
from moeflow.speculation.expert_needs import ExpertNeeds, UsualNeeds
from moeflow.speculation.pass_times import PassTimes
from moeflow.speculation.speculator import Experts

LEAST_GAIN: Final = 0.02  # of tokens a second, else drafts are left alone
MOST_IN_VAIN: Final = 16  # factor on the time that is saved for a try, after tries in vain
LEAST_PASSES: Final = 16  # from which the fit of experts is used
_MEMORY: Final = 128.0  # passes
_LEAST_S: Final = 1e-9  # that a token takes: it may be nothing


class Governor:
    """Chooses drafted tokens."""

    def __init__(self) -> None:
        self.times = PassTimes()
        self.expert_times = RunningFit([0.0] * 3, _MEMORY)  # a pass, its experts, the absent ones of these
        self._usual = UsualNeeds()
        self._needs: ExpertNeeds | None = None  # of the pass being planned, if known
        self.is_tried = False  # whether a trial needs a draft in the next pass
        self._saved = 0.0  # share of a pass, since the last with drafts
        self._in_vain = 1

    def begin(self) -> None:
        """Begin with the next pass, without the last one's predicted experts."""
        self._needs = None

    def choose(
        self,
        roots: Mapping[Request, DraftNode],
        num_rows: int,
        max_tokens: int,
        absent_of: Callable[[Experts], Experts] | None = None,
    ) -> list[Choice]:
        """Return tokens to add to the `num_rows` of a decode pass, up to `max_tokens`: best first.

        `absent_of` returns the experts that are not in memory.
        """
        if absent_of is not None and len(roots) == num_rows and all(root.experts for root in roots.values()):
            return self._choose_by_experts(roots, max_tokens, absent_of)
        return self._choose_by_rows(roots, num_rows, max_tokens)

    def _choose_by_experts(
        self, roots: Mapping[Request, DraftNode], max_tokens: int, absent_of: Callable[[Experts], Experts]
    ) -> list[Choice]:
        """Add whatever token brings most for its experts, one after another; take the number with the best rate."""
        every = frozenset[int]().union(*[token.experts for root in roots.values() for token in root.all()])
        absent = absent_of(every)
        last = [root.experts for root in roots.values()]
        needs, times = ExpertNeeds(last, absent, self._usual), self.expert_times
        base_s = times.seconds(1, needs.num_experts, needs.num_absent)
        if base_s and times.num_observed >= LEAST_PASSES:
            chosen = self._added_one_by_one(roots, needs, base_s, max_tokens)
        else:
            chosen = self._choose_by_rows(roots, len(roots), max_tokens)
        self._needs = ExpertNeeds(last, absent, self._usual)
        for _, token in chosen:
            self._needs.add(token)
        return chosen

    def _added_one_by_one(
        self, roots: Mapping[Request, DraftNode], needs: ExpertNeeds, base_s: float, max_tokens: int
    ) -> list[Choice]:
        def worth(choice: Choice) -> float:
            return choice[1].chance / max(self._added_s(needs, choice[1]), _LEAST_S)

        frontier = [(request, token) for request, root in roots.items() for token in root.children.values()]
        found: list[Choice] = []
        expected, seconds, best, first_s = float(len(roots)), base_s, 0, 0.0
        best_rate = expected / base_s
        least = best_rate * (1 + LEAST_GAIN)
        sizes = dict.fromkeys(roots, 0)
        while frontier and len(found) < max_tokens:
            request, token = choice = max(frontier, key=worth)
            frontier.remove(choice)
            if sizes[request] == MAX_TREE_TOKENS:
                continue
            sizes[request] += 1
            found.append(choice)
            expected += token.chance
            seconds += self._added_s(needs, token)
            first_s = first_s or seconds
            needs.add(token)
            frontier += [(request, child) for child in token.children.values()]
            if expected / seconds > max(best_rate, least):
                best, best_rate = len(found), expected / seconds
        return found[: best or self._probe(first_s / base_s - 1)]

    def _choose_by_rows(self, roots: Mapping[Request, DraftNode], num_rows: int, max_tokens: int) -> list[Choice]:
        likeliest = ranked(roots, max_tokens)
        base_s = self.times.seconds(num_rows)
        if not likeliest or base_s is None:  # nothing to draft, or nothing to compare with
            return []
        best, best_rate = 0, num_rows / base_s
        least = best_rate * (1 + LEAST_GAIN)
        expected = float(num_rows)
        for number, (_, token) in enumerate(likeliest, 1):
            expected += token.chance
            seconds = self.times.expect(num_rows + number)
            if expected / seconds > max(best_rate, least):
                best, best_rate = number, expected / seconds
        return likeliest[: best or self._probe(self.times.expect(num_rows + 1) / base_s - 1)]

    def note(self, num_rows: int, num_drafted: int, num_kept: int, seconds: float) -> None:
        """Count a pass of decodes of so many rows, drafts included."""
        self.times.note(num_rows, seconds)
        if self._needs is not None:
            self.expert_times.observe(seconds, 1, self._needs.num_experts, self._needs.num_absent)
        if num_drafted:
            self._saved, self._in_vain = 0.0, 1 if num_kept else min(2 * self._in_vain, MOST_IN_VAIN)
        else:
            self._saved += SHARE

    def _added_s(self, needs: ExpertNeeds, token: DraftNode) -> float:
        added = needs.added(token)
        return self.expert_times.seconds(0, added.experts, added.absent)

    def _probe(self, share: float) -> int:
        """Return 1 if a token is tried that makes a pass longer by a share."""
        return int(self.is_tried or self._saved >= self._in_vain * share)


Choice = tuple[Request, DraftNode]


def ranked(roots: Mapping[Request, DraftNode], max_tokens: int) -> list[Choice]:
    """Return the likeliest tokens of all requests, no token before its parent."""
    order = count()  # so that equal chances never compare further
    heap = [
        (-token.chance, next(order), request, token)
        for request, root in roots.items()
        for token in root.children.values()
    ]
    heapq.heapify(heap)
    found: list[Choice] = []
    sizes = dict.fromkeys(roots, 0)
    while heap and len(found) < max_tokens:
        _, _, request, token = heapq.heappop(heap)
        if sizes[request] == MAX_TREE_TOKENS:
            continue
        sizes[request] += 1
        found.append((request, token))
        for child in token.children.values():
            heapq.heappush(heap, (-child.chance, next(order), request, child))
    return found
