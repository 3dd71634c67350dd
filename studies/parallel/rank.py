"""A rank of a measurement: see `parallel/child_main.py`. Arguments: the group's descriptor, the weights', and its rank.

Standard input brings a `RankStart`, then a `Task` a pass, as JSON lines; standard output gets a `RankRun` for each. It
ends with its input. One thread computes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Final

import msgspec
import torch
from torch import Tensor

from moeflow.core.errors import GroupError
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.cpu.packed_weight import PackedWeight
from moeflow.kernels.routing import Routing
from moeflow.parallel.group import Group
from moeflow.parallel.shared_memory_group import SharedMemoryGroup
from studies.parallel.case import Case, LayerShape, Tokens
from studies.parallel.layouts import RankLayout, make_layout
from studies.parallel.meter import Meter
from studies.parallel.rank_rates import Measured, measure_rates
from studies.parallel.result import Result
from studies.parallel.shared_weights import SharedWeights
from studies.parallel.whole_model import ModelRun, ModelTask, WholeModel

M_TRIM_THRESHOLD: Final = -1  # as glibc's malloc.h numbers them
M_MMAP_MAX: Final = -4


class RankStart(msgspec.Struct, frozen=True):
    """The first message to a rank."""

    layer: LayerShape
    process_ids: list[int]  # by rank
    timeout_s: float  # of a collective


class Task(msgspec.Struct, frozen=True, tag=True):
    """One pass."""

    case: Case
    layout: str
    is_checked: bool  # whether to compare the result with what one process computes


class RatesTask(msgspec.Struct, frozen=True, tag=True):
    """Measure what predictions start from; the answer is a `Measured`."""


class RankRun(msgspec.Struct, frozen=True):
    """What a rank measured in one pass."""

    seconds: dict[str, float]  # processor time of each section
    wall_s: float  # from when all began to when all were through
    sent_bytes: int
    num_dropped: int  # of this rank's choices
    is_equal: bool | None = None  # to what one process computes, to the bit; None: not checked
    error: float | None = None  # largest difference from that, over the largest value


class RankWorker:
    """Runs passes."""

    def __init__(self, layer: LayerShape, shared: SharedWeights, group: Group) -> None:
        self._layer, self._shared, self._group = layer, shared, group
        random = torch.Generator().manual_seed(0)
        router = torch.randn(layer.num_experts, layer.hidden, generator=random)
        self._router = PackedWeight.pack(router, layer.weights)
        self._everything = shared.whole(list(range(layer.num_experts)))
        self._prepared: _Prepared | None = None
        self._models: dict[tuple[int, bool], WholeModel] = {}  # by number of layers, and whether there is a decoder

    def answer(self, task: Task | RatesTask | ModelTask) -> RankRun | Measured | ModelRun:
        """Run the requested task. Blocks: until the other ranks are through. Raises: GroupError."""
        if isinstance(task, ModelTask):
            return self._model_of(task).run(task, self._shared)
        if isinstance(task, RatesTask):
            return measure_rates(self._layer, self._shared, self._group)
        return self.run(task)

    def _model_of(self, task: ModelTask) -> WholeModel:
        key = task.num_layers, task.num_steps > 0
        if key not in self._models:
            self._models[key] = WholeModel(self._layer, task.num_layers, has_decoder=key[1], group=self._group)
        return self._models[key]

    def run(self, task: Task) -> RankRun:
        """Run a pass. Blocks: until the other ranks are through. Raises: GroupError."""
        prepared = self._prepared
        if prepared is None or prepared.case != task.case:
            prepared = self._prepared = _Prepared(task.case, task.case.tokens(self._group.rank))
        layout = prepared.layout(task.layout, self._shared, self._group.rank)
        meter = Meter(self._group)
        self._group.barrier("begin")
        start_s = time.perf_counter()
        with meter.section("route"):
            self._route(prepared.tokens)
        result = layout.run(prepared.tokens, meter)
        self._group.barrier("end")
        wall_s = time.perf_counter() - start_s
        num_dropped = 0 if result.is_kept is None else int((~result.is_kept).sum())
        is_equal, error = _compare(result, prepared.tokens, self._everything) if task.is_checked else (None, None)
        return RankRun(meter.seconds, wall_s, meter.sent_bytes, num_dropped, is_equal, error)

    def _route(self, tokens: Tokens) -> None:
        """Do what a router does; the choice is that of the case."""
        Routing(tokens.topk_ids.shape[1], renormalize=True)(extension.linear(tokens.x, self._router))


@dataclass(slots=True)
class _Prepared:
    """A case as this rank has it."""

    case: Case
    tokens: Tokens
    layouts: dict[str, RankLayout] = field(default_factory=dict)

    def layout(self, name: str, shared: SharedWeights, rank: int) -> RankLayout:
        if name not in self.layouts:
            self.layouts[name] = make_layout(name, self.case, shared, rank)
        return self.layouts[name]


def _compare(result: Result, tokens: Tokens, everything: PackedExperts) -> tuple[bool, float]:
    """Set a result against the sums of the choices that were kept, by this process alone."""
    kept: Tensor | int = 1 if result.is_kept is None else result.is_kept
    expected = everything.compute(tokens.x, tokens.topk_ids, tokens.topk_weights * kept)
    largest = expected.abs().max() if expected.numel() else torch.tensor(0.0)
    difference = (result.sums - expected).abs().max() if expected.numel() else torch.tensor(0.0)
    return torch.equal(result.sums, expected), float(difference / largest) if largest else float(difference)


def keep_memory() -> None:
    """Have the allocator keep freed memory, as those of engines do: else every pass would fault in fresh pages."""
    c_library = ctypes.CDLL(None)
    if hasattr(c_library, "mallopt"):
        c_library.mallopt(M_MMAP_MAX, 0)
        c_library.mallopt(M_TRIM_THRESHOLD, -1)


def main() -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of them; who started them decides
    group_descriptor, weights_descriptor, rank = (int(argument) for argument in sys.argv[1:])
    line = sys.stdin.buffer.readline()
    if not line:
        return
    start = msgspec.json.decode(line, type=RankStart)
    torch.set_num_threads(1)
    extension.set_num_threads(1)
    keep_memory()
    group = SharedMemoryGroup(group_descriptor, rank, start.process_ids, start.timeout_s)
    os.close(group_descriptor)
    try:
        decoder: msgspec.json.Decoder[Task | RatesTask | ModelTask] = msgspec.json.Decoder(Task | RatesTask | ModelTask)
        worker = RankWorker(start.layer, SharedWeights.open(start.layer, weights_descriptor), group)
        for line in sys.stdin.buffer:
            answer = worker.answer(decoder.decode(line))
            os.write(sys.stdout.fileno(), msgspec.json.encode(answer) + b"\n")
    except GroupError as error:
        raise SystemExit(f"rank {rank}: {error}") from None
    except BaseException as error:
        group.abort(f"{type(error).__name__}: {error}")
        raise
