"""The device that steps compute on, real or rehearsed, and how calls are timed there."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from moeflow.core.units import MIB
from moeflow.planner.hardware.calibrate_device import measure_device
from studies.gpu_check import rehearsal
from studies.gpu_check.options import is_rehearsal

_REPLAYS = 7


class Ceilings(NamedTuple):
    """What the device reaches: the limits that times are compared with."""

    read_bytes_per_s: float
    bf16_flops_per_s: float


class Target:
    """A GPU; in a rehearsal, main memory with the kernels interpreted, or the GPU in software for whole models."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.is_rehearsal = is_rehearsal(options)
        self.engine_device: str = options.device
        self.device = torch.device("cpu" if self.is_rehearsal else options.device)

    def kernels(self) -> AbstractContextManager[None]:
        """Have the public functions use the Triton kernels in the block."""
        return rehearsal.interpreted_kernels() if self.is_rehearsal else nullcontext()

    def models(self) -> AbstractContextManager[None]:
        """Have engines compute on the device in the block."""
        return rehearsal.software_gpu() if self.is_rehearsal else nullcontext()

    def wait(self) -> None:
        """Wait until the device has done all work."""
        if not self.is_rehearsal:
            torch.cuda.synchronize()

    def ceilings(self) -> Ceilings:
        """Measure the device for a second."""
        sizes: dict[str, int] = {"buffer_bytes": 4 * MIB, "matrix_size": 64} if self.is_rehearsal else {}
        level, _, _ = measure_device(self.device, 1, **sizes)
        assert level.processor is not None
        return Ceilings(level.read_bytes_per_s, dict(level.processor.peak_flops_per_s)["bfloat16"])

    def seconds_per_call(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Return the median seconds of a call: calls follow each other in a CUDA graph, if one can be captured.

        Calls that read different memory keep each other's data out of the cache.
        """
        if self.is_rehearsal:
            start = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - start) / len(calls)
        for call in calls:  # compiles kernels, and chooses algorithms
            call()
        self.wait()
        run = _captured(calls)
        times = []
        for _ in range(_REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            run()
            end.record()
            self.wait()
            times.append(float(begin.elapsed_time(end)) / 1000)
        return statistics.median(times[1:]) / len(calls)


def _captured(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:  # it waits for the device, as grouped_mm does before sm_90
        torch.cuda.synchronize()
        return run
    return graph.replay
