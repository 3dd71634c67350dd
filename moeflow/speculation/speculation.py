"""Speculation as the engine sees it: trees before a pass, what became of them after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from moeflow.core.batch import Batch, BatchEntry
from moeflow.core.request import Request
from moeflow.core.token_tree import ROOT, TokenTree, depths
from moeflow.core.trial import GainTrial
from moeflow.speculation.acceptance import Acceptance
from moeflow.speculation.counts import MAX_DEPTH, SpeculationCounts
from moeflow.speculation.draft_tree import DraftNode, merge, tree_of
from moeflow.speculation.governor import Governor
from moeflow.speculation.pass_times import PassTimes
from moeflow.speculation.speculator import Draft, Experts, Speculator
from moeflow.speculation.usefulness import ComputedDraft, Usefulness

logger = logging.getLogger(__name__)

_FEW: Final = 0.5  # weight of the newest of passes that are few, so that they follow what experts are in memory
MOST_IN_A_ROW: Final = 32  # passes with drafts; one without follows, so that the comparison stays current


@dataclass(slots=True)
class Speculation:
    """Runs speculators, chooses the tokens worth computing, and counts accepted ones."""

    speculators: Sequence[Speculator]
    clock: Callable[[], float] = time.perf_counter
    absent_of: Callable[[Experts], Experts] | None = None  # which experts are not in memory; None: all are
    governor: Governor = field(default_factory=Governor)
    counts: SpeculationCounts = field(init=False)
    usefulness: Usefulness = field(init=False)
    _acceptance: Acceptance = field(init=False)
    _nodes: dict[Request, list[DraftNode]] = field(default_factory=dict)  # of the pass under way
    _draft_s: dict[str, float] = field(default_factory=dict)  # of who drafted for it
    _had_drafts: set[str] = field(default_factory=set)
    _failed: set[str] = field(default_factory=set)
    _undrafted: PassTimes = field(default_factory=lambda: PassTimes(weight=_FEW))  # passes without drafting before them
    _num_in_a_row: int = 0  # passes with drafts

    def __post_init__(self) -> None:
        names = [speculator.name for speculator in self.speculators]
        self.usefulness = Usefulness(names)
        self.counts = SpeculationCounts.of(names)
        self._acceptance = Acceptance({speculator.name: speculator.believed for speculator in self.speculators})

    @property
    def trials(self) -> list[GainTrial]:
        """Whether each speculator pays."""
        return list(self.usefulness.trials.values())

    def trees(self, running: Sequence[Request], max_tokens: int) -> dict[Request, TokenTree]:
        """Return drafts for running requests, if all of them decode; `max_tokens` is what a pass may have in all."""
        self._nodes, self._draft_s, self._had_drafts = {}, {}, set()
        self.governor.begin()
        if not running or not all(request.is_decoding for request in running) or self._num_in_a_row == MOST_IN_A_ROW:
            return {}
        start_s = self.clock()
        roots = self._drafted(running)
        chosen: dict[Request, list[DraftNode]] = {}
        room = max_tokens - len(running)
        self.governor.is_tried = any(self.usefulness.is_tried(name) for name in self._had_drafts)
        for request, token in self.governor.choose(roots, len(running), room, self.absent_of):
            chosen.setdefault(request, []).append(token)
        trees: dict[Request, TokenTree] = {}
        for request, tokens in chosen.items():
            trees[request], self._nodes[request] = tree_of(tokens)
        total_s = self.clock() - start_s
        self.counts.draft_s += total_s
        self._charge(total_s - sum(self._draft_s.values()))
        return trees

    def note(self, batch: Batch, kept: Mapping[Request, Sequence[int]], seconds: float) -> None:
        """Count what became of the drafts in a pass; `kept` has the nodes of trees that were right."""
        drafts: list[ComputedDraft] = []
        for entry in batch.entries:
            if entry.tree:
                found = self._judge(entry, kept.get(entry.request, ()))
                self.counts.note_tree(found)
                drafts += found
        self.counts.passes += bool(drafts)
        self._num_in_a_row = self._num_in_a_row + 1 if drafts or (self.absent_of and self._draft_s) else 0
        if all(entry.num_tokens == 1 and entry.samples for entry in batch.entries):
            num_kept = sum(draft.is_kept for draft in drafts)
            self.governor.note(batch.num_tokens, len(drafts), num_kept, seconds)
            self._note_use(drafts, len(batch.entries), seconds)
        self._draft_s, self._had_drafts = {}, set()  # a pass without drafting must not be charged again

    def nodes(self, entry: BatchEntry) -> list[DraftNode]:
        """Return who drafted the tokens of an entry's tree, and their chances, while its pass is the newest."""
        return self._nodes.get(entry.request, [])[: len(entry.tree)]

    def forget(self, request: Request) -> None:
        """Let go of a request that has ended."""
        self._nodes.pop(request, None)
        self._acceptance.forget(request.request_id)
        for speculator in self.speculators:
            speculator.forget(request)

    def _charge(self, seconds: float) -> None:
        """Add the time of merging and choosing to that of speculators with drafts."""
        for name in self._had_drafts:
            self._draft_s[name] += seconds / len(self._had_drafts)

    def _drafted(self, running: Sequence[Request]) -> dict[Request, DraftNode]:
        proposed: list[list[tuple[str, Draft]]] = [[] for _ in running]
        for speculator in self.speculators:
            for found, drafts in zip(proposed, self._proposed_by(speculator, running), strict=True):
                found += [(speculator.name, draft) for draft in drafts]
        self._had_drafts = {name for found in proposed for name, _ in found}
        roots: dict[Request, DraftNode] = {}
        for request, found in zip(running, proposed, strict=True):
            max_depth = min(MAX_DEPTH, request.max_tokens - len(request.output_token_ids) - 1)
            if found and max_depth > 0:
                roots[request] = merge(found, max_depth, partial(self._acceptance.chance, request.request_id))
        return roots

    def _proposed_by(self, speculator: Speculator, running: Sequence[Request]) -> list[list[Draft]]:
        """Return a speculator's drafts; none if it rests, or has failed: drafting must never end a request."""
        name = speculator.name
        is_known = self.governor.times.seconds(len(running)) is not None  # what a pass without drafts takes
        if name in self._failed or not is_known or not self.usefulness.pays(name):
            return [[] for _ in running]
        start_s = self.clock()
        try:
            return speculator.propose(running, min(self.usefulness.depth(name), MAX_DEPTH))
        except Exception:
            logger.exception("speculator %r failed and is not used any more; answers are not concerned", name)
            self._failed.add(name)
            return [[] for _ in running]
        finally:
            self._draft_s[name] = self.clock() - start_s
            self.counts.speculators[name].draft_s += self._draft_s[name]

    def _note_use(self, drafts: Sequence[ComputedDraft], num_requests: int, seconds: float) -> None:
        """Count what drafts brought and took, in a pass of decodes.

        With experts on disk, drafting may also save time, because reads begin earlier. Then the pass itself is compared
        with passes without drafting.
        """
        times, draft_s = self.governor.times, self._draft_s
        if self.absent_of is not None:
            if not draft_s:
                self._undrafted.note(num_requests, seconds)
            plain_s = self._undrafted.seconds(num_requests)
            extra_s = seconds - (plain_s or seconds)
            if not drafts:
                draft_s = {name: took_s + extra_s / len(draft_s) for name, took_s in draft_s.items()}
        else:
            plain_s, with_s = times.seconds(num_requests), times.seconds(num_requests + len(drafts))
            extra_s = max((with_s or 0.0) - (plain_s or 0.0), 0.0)
        if plain_s:
            self.usefulness.note(draft_s, drafts, num_requests=num_requests, plain_s=plain_s, extra_s=extra_s)
        for name, counts in self.counts.speculators.items():
            counts.is_resting = name in self._failed or self.usefulness.is_tried(name)

    def _judge(self, entry: BatchEntry, right: Sequence[int]) -> list[ComputedDraft]:
        """Count the drafts whose parents were right; return all."""
        known = {ROOT, *right}
        nodes = self.nodes(entry)
        for node, (token, parent) in enumerate(zip(nodes, entry.tree.parents, strict=True)):
            if parent in known:
                for name, grade in token.origins:
                    self._acceptance.note(entry.request.request_id, name, grade, is_right=node in known)
        return [
            ComputedDraft(frozenset(name for name, _ in token.origins), depth, node in known)
            for node, (token, depth) in enumerate(zip(nodes, depths(entry.tree.parents), strict=True))
        ]
