"""Observes the passes of an engine while somebody looks: from a question until `LEASE_S` after the last one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from moeflow.core.batch import Batch
from moeflow.core.engine_messages import DraftedTree
from moeflow.core.observation import (
    LEASE_S,
    ExpertQuestion,
    ExpertSight,
    Question,
    RequestQuestion,
    RequestSight,
    Sight,
    SpeedQuestion,
    TimelineQuestion,
    TimelineSight,
    TokenQuestion,
    TokenSight,
    Watching,
)
from moeflow.core.request import Request
from moeflow.engine.observing.expert_counts import LOAD_BOUNDS, ExpertCounts
from moeflow.engine.observing.observed_model import ObservedModel
from moeflow.engine.observing.observed_pass import ObservedPass
from moeflow.engine.observing.pass_folding import PassFolding
from moeflow.engine.observing.pass_speeds import PassSpeeds
from moeflow.engine.observing.request_records import RequestRecords
from moeflow.engine.verification import Verified

_MAX_ROWS: Final = 4096  # of passes that are added to the counts at once: they take memory until then


class Observer:
    """What one engine has seen since somebody began to look."""

    def __init__(self, model: ObservedModel, clock: Callable[[], float] = time.monotonic) -> None:
        """Observe passes from now on. `clock` gives seconds and never goes back."""
        self._model, self._clock = model, clock
        self._since_s = clock()
        self._until_s = self._since_s
        shape = (len(model.layers), model.num_experts)
        self._counts = ExpertCounts(*shape)
        self._records = RequestRecords(*shape, model.top_k)
        self._folding = PassFolding(model.groups, self._counts, self._records)
        self._speeds = PassSpeeds(self._since_s, model.num_experts)
        self._waited_before_s = model.waited_s()
        self._passes: list[ObservedPass] = []  # not yet added, all of one second
        self._num_rows = 0  # of these
        self._second = int(self._since_s)
        self._reads_at_first = self._reads_before = model.reads()
        model.tap.open()
        model.residency.count(*shape)
        model.spans.recording(1)  # begins to record them

    @property
    def is_over(self) -> bool:
        """Whether the last question is older than `LEASE_S`."""
        return self._clock() > self._until_s

    def answer(self, question: Question) -> Sight:
        """Answer a question, and observe for the next `LEASE_S`."""
        self._until_s = self._clock() + LEASE_S
        self._fold()
        match question:
            case ExpertQuestion():
                return self._experts()
            case RequestQuestion():
                return RequestSight(
                    layers=self._model.layers,
                    num_experts=self._model.num_experts,
                    sequences=[record.sight() for record in self._records.find(question.request_id)],
                )
            case TokenQuestion():
                return TokenSight(
                    layers=self._model.layers,
                    num_experts=self._model.num_experts,
                    top_k=self._model.top_k,
                    sequences=[record.tokens() for record in self._records.find(question.request_id)],
                )
            case SpeedQuestion():
                return self._speeds.sight(self._clock())
            case TimelineQuestion():
                recording = self._model.spans.recording(question.num_passes)
                return TimelineSight(msgspec.msgpack.encode(recording))
        return Watching(self._clock() - self._since_s)

    def begin_pass(self) -> None:
        """A pass begins."""
        self._reads_before = self._model.reads()
        self._model.tap.begin_pass()

    def end_pass(self, batch: Batch, sampled: Mapping[Request, Verified], start_s: float, duration_s: float) -> None:
        """A pass has ended; `sampled` are the tokens that it brought, `start_s` is on the engine's clock."""
        second = int(self._clock())
        if second != self._second or self._num_rows >= _MAX_ROWS:
            self._fold()
            self._second = second
        (stall_before_s, bytes_before), (stall_s, read_bytes) = self._reads_before, self._model.reads()
        choices = self._model.tap.end_pass()
        one = ObservedPass(
            entries=batch.entries,
            sampled=sampled,
            choices=choices,
            num_rows=batch.num_tokens,
            start_s=start_s,
            duration_s=duration_s,
            stall_s=stall_s - stall_before_s,
            read_bytes=read_bytes - bytes_before,
        )
        waited_before_s, self._waited_before_s = self._waited_before_s, self._model.waited_s()
        self._speeds.note(one, self._waited_before_s - waited_before_s, self._clock())
        self._passes.append(one)
        self._num_rows += batch.num_tokens

    def note_drafts(self, request: Request, first: int, tree: DraftedTree) -> None:
        """A pass had drafts of a request; `first` is the place of its first token among the output."""
        self._records.of(request).add_drafts(first, tree)

    def drop_pass(self) -> None:
        """A pass has failed."""
        self._model.tap.end_pass()
        self._speeds.rest()

    def rest(self) -> None:
        """No work is left for now."""
        self._speeds.rest()

    def close(self) -> None:
        """Observe no more, and give back what that takes."""
        self._model.tap.close()
        self._model.residency.end()
        self._model.spans.end_recording()

    def _fold(self) -> None:
        if self._passes:
            self._folding.fold(self._passes, self._second)
            self._passes, self._num_rows = [], 0
        self._records.settle()

    def _experts(self) -> ExpertSight:
        model, counts, now_s = self._model, self._counts, self._clock()
        (first_stall_s, first_bytes), (stall_s, read_bytes) = self._reads_at_first, model.reads()
        shape, needs = (len(model.layers), model.num_experts), model.residency.needs
        return ExpertSight(
            layers=model.layers,
            num_encoder_layers=model.num_encoder_layers,
            num_experts=model.num_experts,
            top_k=model.top_k,
            is_counting=model.is_counted,
            counted_s=now_s - self._since_s,
            num_passes=counts.num_passes,
            total=counts.total.as_message(),
            last_pass=counts.last_pass.as_message(),
            last_minute=counts.last_minute(int(now_s)).as_message(),
            load_bounds=list(LOAD_BOUNDS),
            loads=counts.loads.tolist(),
            residency=model.residency.tiers(*shape).tobytes(),
            hits=b"" if needs is None else needs.hits.astype("<i8").tobytes(),
            misses=b"" if needs is None else needs.misses.astype("<i8").tobytes(),
            read_bytes=read_bytes - first_bytes,
            stall_s=stall_s - first_stall_s,
            not_counted=self._not_counted(),
        )

    def _not_counted(self) -> str:
        number = self._folding.num_unseen
        if self._model.not_counted or not number:
            return self._model.not_counted
        return f"{number} passes: their routers' choices did not arrive whole"
