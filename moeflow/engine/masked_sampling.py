"""Samples the rows of a pass, those of requests whose answers have a form once their masks are there.

A pass waits for masks a short time only. A request whose mask comes later keeps its logits and sits out the passes
until then. It gets the same token, and other requests do not wait for it. Its drafted tokens are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import replace
from typing import Final

import msgspec

from moeflow.core.batch import BatchEntry
from moeflow.core.request import Request, RequestStatus
from moeflow.core.token_mask import TokenMask
from moeflow.core.token_tree import NO_TREE
from moeflow.engine.constraints.mask_lanes import MaskJob, MaskLanes
from moeflow.engine.sampler import SampledToken
from moeflow.engine.verification import Verified, verify
from moeflow.kernels.arrays import Array, copied, rows_of

PASS_WAIT_S: Final = 0.01  # of a pass that is computed, for masks that are not
PATIENCE_S: Final = 60.0  # for all masks of an answer that came late; then it fails, and leaves its place to others
TOO_LATE: Final = (
    f"this answer has waited {PATIENCE_S:.0f} s for the tokens that its form allows: simplify the form, or try again "
    "when the server computes fewer slow ones"
)


class _LateRow(msgspec.Struct, frozen=True):
    """Logits [1, V] of an entry, which wait for a mask."""

    entry: BatchEntry  # without drafts
    logits: Array
    since_s: float


class MaskedSampling:
    """Of one engine."""

    def __init__(self, pass_wait_s: float | None = PASS_WAIT_S) -> None:
        """`pass_wait_s` None: a pass waits for all of its masks."""
        self._pass_wait_s = pass_wait_s
        self._lanes = MaskLanes()
        self._jobs: dict[Request, MaskJob] = {}
        self._late: dict[Request, _LateRow] = {}
        self._waited_s: dict[Request, float] = {}  # of requests that had late rows

    def begin(self, entries: Sequence[BatchEntry]) -> None:
        """Begin with the masks of entries that sample, while their pass is computed."""
        self._lanes.relieve()
        self._forget_finished()
        for entry in entries:
            request = entry.request
            if request.constraint is None:
                continue
            self._late.pop(request, None)  # it was preempted, and is computed again
            job = self._jobs.get(request)
            if job is None or len(job.token_ids) != len(request.output_token_ids):
                self._jobs[request] = self._lanes.begin(entry, request.constraint)

    def sample(self, logits: Array, entries: Sequence[BatchEntry]) -> dict[Request, Verified]:
        """Return what entries bring whose masks are there.

        Shapes: logits [R, V] float32; of each entry that of its last token, then those of its tree. Not changed.
        """
        self._await_masks(entries)
        late = {entry.request for entry in entries if self._is_late(entry)}
        if not late:
            return self._verified(logits, entries)
        rows: list[int] = []
        first = 0
        for entry in entries:
            if entry.request in late:
                row = copied(logits[first : first + 1])  # the next pass may write where this one did
                self._late[entry.request] = _LateRow(replace(entry, tree=NO_TREE), row, time.monotonic())
            else:
                rows += range(first, first + entry.num_sampled)
            first += entry.num_sampled
        in_time = [entry for entry in entries if entry.request not in late]
        return self._verified(rows_of(logits, rows), in_time) if in_time else {}

    def take_late(self, wait_s: float) -> list[tuple[BatchEntry, Verified]]:
        """Return what entries of earlier passes bring now that they have their masks. Waits for a first one, if any."""
        self._lanes.relieve()
        self._forget_finished()
        pending = [self._jobs[request].masks for request in self._late]
        if pending and wait_s and not any(masks.done() for masks in pending):
            wait(pending, wait_s, FIRST_COMPLETED)
        found: list[tuple[BatchEntry, Verified]] = []
        for request, row in [*self._late.items()]:
            job = self._jobs[request]
            waited_s = self._waited_s.get(request, 0.0) + time.monotonic() - row.since_s
            if job.masks.done():
                self._waited_s[request] = waited_s
                found.append((row.entry, self._verified(row.logits, [row.entry])[request]))
            elif waited_s > PATIENCE_S:
                del self._jobs[request]
                found.append((row.entry, Verified([SampledToken(-1, error=TOO_LATE, blames_request=True)], [])))
        for entry, _ in found:
            del self._late[entry.request]
        return found

    def close(self) -> None:
        """End the threads."""
        self._lanes.close()

    def _forget_finished(self) -> None:
        known: set[Request] = {*self._jobs, *self._waited_s}
        for request in known:
            if request.status is RequestStatus.FINISHED:
                for kept in (self._jobs, self._late, self._waited_s):
                    kept.pop(request, None)

    def _await_masks(self, entries: Sequence[BatchEntry]) -> None:
        jobs = [self._jobs[entry.request] for entry in entries if entry.request.constraint is not None]
        wait([job.masks for job in jobs if self._pass_wait_s is None or not job.is_slow], self._pass_wait_s)

    def _is_late(self, entry: BatchEntry) -> bool:
        return entry.request.constraint is not None and not self._jobs[entry.request].masks.done()

    def _verified(self, logits: Array, entries: Sequence[BatchEntry]) -> dict[Request, Verified]:
        masks: Mapping[Request, Sequence[TokenMask | None]] = {
            entry.request: self._jobs.pop(entry.request).masks.result()[: entry.num_sampled]
            for entry in entries
            if entry.request.constraint is not None
        }
        verified = verify(logits, entries, masks)
        return {entry.request: one for entry, one in zip(entries, verified, strict=True)}
