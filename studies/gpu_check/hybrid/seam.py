"""Times the exchange of an empty layer between GPU and CPU, beside the least time: two copies and a look at a flag."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import torch

from moeflow.core.units import MIB
from moeflow.engine import decode_graphs
from moeflow.experts.hybrid.lanes import Lanes, lanes_of
from moeflow.experts.hybrid.seam import Seam
from moeflow.experts.hybrid.slab_copies import PIECE_BYTES
from moeflow.kernels.cpu.device_flag import DeviceFlag
from moeflow.kernels.cpu.expert_slots import PresentExperts
from moeflow.kernels.cpu.packed_experts import PackedExperts
from studies.gpu_check.findings import Findings
from studies.gpu_check.hybrid.configs import torch_device
from studies.gpu_check.resident.layers import shape_of
from studies.gpu_check.resident.target import Target

BATCHES: Final = (1, 16)
MOVING: Final = "graphs, while experts move"
_MOVED_BYTES: Final = 256 * MIB  # a link copies them for longer than a pass takes
_ROUNDS: Final = 20


class _Steps:
    """The seam as a recorder of graphs takes it."""

    takes_graphs = True

    def __init__(self, seam: Seam) -> None:
        self.cut_by = seam.cut_by


def run(options: argparse.Namespace, findings: Findings) -> None:
    """Note the microseconds of a layer, one by one and in graphs, and of its parts."""
    target = Target(options)
    with target.models():
        for batch in BATCHES:
            found = {name: round(1e6 * seconds, 2) for name, seconds in _measured(target, batch).items()}
            findings.note(**{f"batch {batch}": found})
            floor = found["floor"]
            for way in ("eager", "graphs", MOVING):
                findings.row(f"empty layer, {way}, batch {batch}", f"{found[way]:.1f} us", f"floor {floor:.1f} us")


def _measured(target: Target, batch: int) -> dict[str, float]:
    """Return the seconds of a layer, and of the parts that no layer can do without."""
    shape, device = shape_of(target), torch_device(target)
    num_layers = 2 if target.is_rehearsal else 48
    lanes = lanes_of(device)
    seam = Seam(lanes, device, batch, shape.hidden, shape.top_k)
    seam.num_tokens = batch
    absent = np.full(1, -1, np.int32)
    experts = PresentExperts(PackedExperts(1, shape.hidden, 32, "float32"), absent)  # none of them is computed
    hidden = torch.zeros((batch, shape.hidden), device=device)
    ids = torch.zeros((batch, shape.top_k), dtype=torch.int64, device=device)
    weights = torch.zeros((batch, shape.top_k), device=device)

    def layers() -> torch.Tensor:
        passed = hidden
        for _ in range(num_layers):
            seam.send(passed, ids, weights)
            seam.compute(0, experts, batch, lambda _: None)
            passed = seam.receive(batch)
        return passed

    graph, _ = decode_graphs.GraphRecorder(device, _Steps(seam)).capture(layers)
    parts = {
        "eager": _seconds(target, layers) / num_layers,
        "graphs": _seconds(target, graph.replay) / num_layers,
        MOVING: _beside_copies_s(target, lanes, device, graph.replay) / num_layers,
        "flag": _flag_s(target, device),
        "to host": _copy_s(target, device, torch.zeros_like(hidden, device="cpu"), hidden),
        "to device": _copy_s(target, device, hidden, torch.zeros_like(hidden, device="cpu")),
    }
    return parts | {"floor": parts["flag"] + parts["to device"]}


def _seconds(target: Target, run: Callable[[], object]) -> float:
    """Return the median time of a call, until the GPU has done it."""
    times = []
    for _ in range(2 if target.is_rehearsal else _ROUNDS):
        target.wait()
        start = time.perf_counter()
        run()
        target.wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _beside_copies_s(target: Target, lanes: Lanes, device: torch.device, run: Callable[[], object]) -> float:
    """Return the median time of a call until its stream is done, while pieces of experts cross the link."""
    size = PIECE_BYTES if target.is_rehearsal else _MOVED_BYTES
    source = torch.zeros(size, dtype=torch.uint8, pin_memory=not target.is_rehearsal)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    times = []
    for _ in range(2 if target.is_rehearsal else _ROUNDS):
        target.wait()
        with lanes.copying():
            for piece, source_piece in zip(*(torch.split(it, PIECE_BYTES) for it in (there, source)), strict=True):
                piece.copy_(source_piece, non_blocking=not target.is_rehearsal)
        start = time.perf_counter()
        run()
        if not target.is_rehearsal:
            torch.cuda.current_stream(device).synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _flag_s(target: Target, device: torch.device) -> float:
    """Return the time from the start of a copy of eight bytes until the host sees them."""
    flag = DeviceFlag(torch.zeros(1, dtype=torch.int64, pin_memory=not target.is_rehearsal))
    raised = torch.ones(1, dtype=torch.int64, device=device)
    times = []
    for _ in range(2 if target.is_rehearsal else _ROUNDS):
        flag.lower()
        target.wait()
        start = time.perf_counter()
        flag.memory.copy_(raised, non_blocking=True)
        assert flag.wait(10.0)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _copy_s(target: Target, device: torch.device, to: torch.Tensor, source: torch.Tensor) -> float:
    """Return the time of a copy among others of the same stream."""
    number = 2 if target.is_rehearsal else 100
    if not target.is_rehearsal:
        to, source = (it if it.is_cuda else it.pin_memory() for it in (to, source))
    copy = partial(to.copy_, source, non_blocking=not target.is_rehearsal)

    def copies() -> None:
        for _ in range(number):
            copy()

    return _seconds(target, copies) / number
