"""Measures this machine: what memory, processor and disk do at best, and how near to that kernels come at given shapes.

In rounds, over some fifteen seconds: a machine that others share is now faster and now slower, for seconds on end.
Every round sets its kernels against its own roofs; medians over the rounds count, and how far the roofs lay apart is
what predictions are to be trusted to.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from moeflow.core.hardware import DISK, RAM, KernelEfficiency, Machine, MemoryLevel, Processor
from moeflow.kernels import cpu
from moeflow.kernels.weight_format import WEIGHT_FORMATS
from moeflow.planner.disk_rates import disk_bench
from moeflow.planner.kernel_bench import KernelBench, KernelShape, Roofs
from moeflow.planner.model_costs import Work
from moeflow.planner.roofline import processor_of, work_seconds

OnStep = Callable[[str], None]  # told what is being measured

NUM_ROUNDS: Final = 3
NUM_GLANCES: Final = 10  # samples of the roofs by which a machine is known again
GLANCE_S: Final = 0.1  # between them
LIKENESS: Final = 1.25  # ratio of speeds that pass for the same
LEAST_UNCERTAINTY: Final = 0.12
# Of a pass beside kernels, and of each token in it: `step` less the C++ calls in it, a 1.3-billion model on two Zen 5
# cores: 0.55 ms at batch 1, 1.1 to 1.3 at 32. A tiny model's is a quarter of that: weights drive all else from caches.
PASS_S: Final = 5.5e-4
TOKEN_S: Final = 2e-5


GENERAL: Final = tuple(
    KernelShape(kernel, dtype, sizes)
    for dtype in WEIGHT_FORMATS
    for kernel, sizes in (("linear", (2048, 1024)), ("experts", (16, 2, 1024, 768)))
) + tuple(KernelShape("attention", dtype, (16, 4, 64)) for dtype in ("float32", "bfloat16", "int8"))


def measure_machine(
    name: str,
    *,
    num_threads: int,
    ram_bytes: int,
    folder: Path,
    shapes: Iterable[KernelShape] = (),
    on_step: OnStep = lambda _: None,
) -> Machine:
    """Measure a machine without a device: memory, processor, disk, and kernels on shapes of the middle and on `shapes`.

    `folder` is on the disk that counts. Blocks: for some 15 seconds. Raises: OSError if nothing can be written there.
    """
    rounds = _Rounds(num_threads)
    wanted = list(dict.fromkeys((*GENERAL, *shapes)))
    with disk_bench(folder) as disk:
        for number in range(NUM_ROUNDS):
            on_step(f"disk, {number + 1} of {NUM_ROUNDS}")
            disk.sample()
            rounds.run(wanted, lambda what, number=number: on_step(f"{what}, {number + 1} of {NUM_ROUNDS}"))  # type: ignore[misc]
    free, link = os.statvfs(folder), disk.link()
    levels = (
        MemoryLevel(
            name=DISK, capacity_bytes=max(free.f_bavail * free.f_frsize, 1), read_bytes_per_s=link.peak_bytes_per_s
        ),
        rounds.level(ram_bytes),
    )
    how = f"measured by moeflow: {num_threads} threads, {cpu.isa_name() if cpu.is_available() else 'torch'}"
    machine = Machine(name=name, levels=levels, links=(link,), uncertainty=rounds.uncertainty, sources=(("all", how),))
    return _with_efficiencies(machine, rounds.efficiencies())


def measure_kernels(
    machine: Machine, shapes: Iterable[KernelShape], *, num_threads: int, on_step: OnStep = lambda _: None
) -> Machine:
    """Return the machine with the kernels' efficiency on more shapes, as far as they are not known yet."""
    known = {(it.kernel, it.dtype, it.values) for it in processor_of(machine.level(RAM)).efficiencies}
    missing = [shape for shape in shapes if (shape.kernel, shape.dtype, shape.values) not in known]
    if not missing or not cpu.is_available():
        return machine
    rounds = _Rounds(num_threads)
    for _ in range(NUM_ROUNDS):
        rounds.run(missing, on_step)
    return _with_efficiencies(machine, rounds.efficiencies())


def is_as_measured(machine: Machine, num_threads: int) -> bool:
    """Say whether memory and processor are about as fast as they were when the machine was measured: a glance."""
    level = machine.level(RAM)
    bench = KernelBench(num_threads)
    samples = []
    with bench.threads():
        for _ in range(NUM_GLANCES):
            samples.append(bench.roofs())
            time.sleep(GLANCE_S)
    roofs = _median(samples)
    pairs = [(level.read_bytes_per_s, roofs.read)]
    pairs += [(processor_of(level).peak(dtype), peak) for dtype, peak in roofs.peaks.items()]
    return all(max(pair) <= LIKENESS * min(pair) for pair in pairs)


class _Rounds:
    """Measurements of the same things at several times."""

    def __init__(self, num_threads: int) -> None:
        self._bench = KernelBench(num_threads)
        self._roofs: list[Roofs] = []  # a round's median
        self._shares: dict[Work, list[float]] = {}  # of the roof of their round

    def run(self, shapes: Iterable[KernelShape], on_step: OnStep) -> None:
        """Measure everything once more."""
        on_step("memory and arithmetic")
        with self._bench.threads():
            samples, found = [self._bench.roofs()], []
            for shape in shapes if cpu.is_available() else ():
                on_step(f"{shape.kernel} in {shape.dtype}")
                found += self._bench.measure(shape)
                samples.append(self._bench.roofs())
        self._roofs.append(_median(samples))
        level = _level(self._roofs[-1], ram_bytes=1)
        for work, seconds in found:
            self._shares.setdefault(work, []).append(work_seconds(level, work) / seconds)

    def level(self, ram_bytes: int) -> MemoryLevel:
        """Return memory and processor, by the median of all rounds."""
        return _level(_median(self._roofs), ram_bytes)

    def efficiencies(self) -> list[KernelEfficiency]:
        """Return what share of the roofs each kernel reached, by the median of all rounds."""
        return [
            KernelEfficiency(
                kernel=work.kernel,
                dtype=work.dtype,
                rows=round(work.rows, 3),
                share=statistics.median(shares),
                values=work.values,
            )
            for work, shares in self._shares.items()
        ]

    @property
    def uncertainty(self) -> float:
        """How far the rounds' roofs lay apart, relative; above 1 if one round's were more than twice another's.

        Not less than what is seen within a round.
        """
        series = [[it.read for it in self._roofs]]
        series += [[it.peaks[dtype] for it in self._roofs] for dtype in self._roofs[0].peaks]
        return max(LEAST_UNCERTAINTY, *(max(values) / min(values) - 1 for values in series))


def _median(samples: Sequence[Roofs]) -> Roofs:
    peaks = {dtype: statistics.median(it.peaks[dtype] for it in samples) for dtype in samples[0].peaks}
    return Roofs(statistics.median(it.read for it in samples), peaks)


def _level(roofs: Roofs, ram_bytes: int) -> MemoryLevel:
    processor = Processor(
        name=_processor_name(), peak_flops_per_s=tuple(roofs.peaks.items()), pass_s=PASS_S, token_s=TOKEN_S
    )
    return MemoryLevel(name=RAM, capacity_bytes=ram_bytes, read_bytes_per_s=roofs.read, processor=processor)


def _with_efficiencies(machine: Machine, more: Iterable[KernelEfficiency]) -> Machine:
    processor = processor_of(machine.level(RAM))
    found = {(it.kernel, it.dtype, it.values, it.rows): it for it in (*processor.efficiencies, *more)}
    made = replace(processor, efficiencies=tuple(found.values()))
    levels = tuple(replace(it, processor=made) if it.name == RAM else it for it in machine.levels)
    return replace(machine, levels=levels)


def _processor_name() -> str:
    """Return what the system calls the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "processor"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else "processor"
