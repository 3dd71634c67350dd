"""Records the passes of a model, and has its layers tell their times, while a trace is on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from moeflow.core.batch import Batch
from moeflow.core.model_config import ModelConfig
from moeflow.models.layers.decoder import CausalLM
from moeflow.pipeline.runtime.layer_times import ATTENTION, EXPERTS, ROUTER, LayerFacts, LayerTimes
from moeflow.pipeline.runtime.recording import Recording, recording_of
from moeflow.pipeline.runtime.trace import MAX_SPANS, SAMPLING, Label, Trace

if TYPE_CHECKING:
    from moeflow.parallel.timed_group import WaitClock

PASSES: Final = "passes"  # a trace's row of whole passes
RANKS: Final = "ranks"  # its row of waits for other ranks
COMPUTING: Final = (ATTENTION, ROUTER, EXPERTS, SAMPLING)  # rows of the thread that computes
KEPT_PASSES: Final = 64  # the last ones, unless all are written at the end
_ORDER: Final = (PASSES, ATTENTION, ROUTER, EXPERTS, RANKS)  # rows that come first


class PassTracing:
    """Of one process."""

    def __init__(
        self,
        trace: Trace,
        model: object,
        config: ModelConfig,
        waits: WaitClock | None = None,
        *,
        keeps_all: bool = False,
    ) -> None:
        """Take a trace, the model that computes passes, and the clock of waits for other ranks, if there are some.

        `keeps_all`: also passes before the last ones.
        """
        self._trace = trace
        self._row = trace.row(PASSES)
        self._keeps_all = keeps_all
        self._starts_ns: deque[int] = deque(maxlen=KEPT_PASSES)
        self._clock_ns = time.time_ns() - time.perf_counter_ns()
        self._flops_per_token = 2 * config.num_active_parameters  # without attention's, which grow with contexts
        self._model = model if isinstance(model, CausalLM) and _is_on_cpu(model) else None
        self._times: LayerTimes | None = None
        if self._model is not None:
            facts = [_facts(self._model, number, config) for number in range(len(self._model.layers))]
            self._times = LayerTimes(facts, MAX_SPANS // max(len(facts), 1) if keeps_all else 2 * KEPT_PASSES)
            self._times.add_to(trace)
        self._waits = waits
        self._rank_row = None if waits is None else trace.row(RANKS)
        trace.rows.sort(key=lambda row: _ORDER.index(row.name) if row.name in _ORDER else len(_ORDER))
        trace.follow(self._time_layers)

    @property
    def is_on(self) -> bool:
        """Whether passes are recorded."""
        return self._trace.is_on

    def switch(self, *, is_on: bool) -> None:
        """Begin to record passes, or end that and forget them; recording of all passes never ends. Between passes."""
        if not self._keeps_all:
            self._trace.switch(is_on=is_on)

    def end_pass(self, batch: Batch, start_ns: int, end_ns: int) -> None:
        """Record a pass."""
        requests = tuple(entry.request.request_id for entry in batch.entries)
        label = Label(_name(batch), flops=self._flops_per_token * batch.num_tokens, requests=requests)
        self._row.record(label, start_ns, end_ns)
        self.note_pass(start_ns)

    @contextmanager
    def part_of_pass(self, num_tokens: int) -> Iterator[None]:
        """Record the block as this rank's part of a pass, if passes are recorded."""
        start_ns = time.perf_counter_ns()
        yield
        if self.is_on:
            self._row.record(
                Label(f"part of a pass of {_count(num_tokens, 'token')}"), start_ns, time.perf_counter_ns()
            )
            self.note_pass(start_ns)

    def note_pass(self, start_ns: int) -> None:
        """Keep the spans of the last passes, of which the newest began at `start_ns`."""
        is_full = len(self._starts_ns) == KEPT_PASSES
        self._starts_ns.append(start_ns)
        if is_full and not self._keeps_all:
            self._trace.drop_before(self._starts_ns[0])

    def recording(self, num_passes: int) -> Recording:
        """Return the spans of the last passes, of at most `KEPT_PASSES`."""
        starts_ns = list(self._starts_ns)[-num_passes:]
        start_ns = starts_ns[0] if starts_ns else time.perf_counter_ns()
        return recording_of(self._trace, start_ns, len(starts_ns), self._clock_ns, self._times)

    def _time_layers(self, is_on: bool) -> None:
        if self._model is not None:
            self._model.layer_times = self._times if is_on else None
        if self._times is not None:
            self._times.passes.clear()
        if self._waits is not None:
            self._waits.on_wait = self._record_wait if is_on else None
        self._starts_ns.clear()

    def _record_wait(self, name: str, start_ns: int, end_ns: int) -> None:
        if self._rank_row is not None:
            self._rank_row.record(Label(f"waits for other ranks: {name}"), start_ns, end_ns, is_blocked=True)


def _name(batch: Batch) -> str:
    num_prompts = sum(not entry.request.output_token_ids for entry in batch.entries)
    count = len(batch.entries)
    kind = {0: "decode", count: "prompt"}.get(num_prompts, "prompt and decode")
    return f"{kind} pass of {_count(batch.num_tokens, 'token')}, {_count(count, 'request')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _is_on_cpu(model: CausalLM) -> bool:
    """Return whether calls of layers last as long as their work; a GPU's calls only launch it."""
    return model.device is None or str(model.device) == "cpu"


def _facts(model: CausalLM, place: int, config: ModelConfig) -> LayerFacts:
    """Return the facts of one of the model's layers, `place` counted from its first one."""
    number, layer, networks = model.first_layer + place, model.layers[place], config.feed_forward
    width = config.dense_width_of(number)
    if layer.has_router:
        width = config.routing.top_k * networks.intermediate_size + networks.shared_intermediate_size
    return LayerFacts(
        number,
        attends=number in config.attention_layers,
        has_router=layer.has_router,
        network_flops=2 * networks.num_matrices * config.hidden_size * width,
    )
