"""Measures this machine: what memory, processor and disk do at best, and how near to that kernels come at given shapes.

In rounds, over some fifteen seconds: a machine that others share is now faster and now slower, for seconds on end.
Every round compares its kernels with its own roofs; medians over the rounds count. The spread of the roofs is the
accuracy to expect of predictions. A round that other work disturbs is repeated a few times, and the calmest rounds
count. The figures include the share of the processor that others took.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from moeflow.core.hardware import DISK, RAM, KernelEfficiency, Machine, MemoryLevel, Processor
from moeflow.kernels.cpu import extension
from moeflow.kernels.weight_format import WEIGHT_FORMATS
from moeflow.planner.costs.model_costs import KernelWork
from moeflow.planner.costs.roofline import processor_of, work_seconds
from moeflow.planner.hardware.disk_rates import DiskBench, disk_bench
from moeflow.planner.hardware.kernel_bench import (
    ROW_OPERATIONS,
    THOROUGH,
    BestRates,
    Effort,
    KernelBench,
    KernelShape,
    parts_of,
)
from moeflow.planner.hardware.other_work import DISTURBING, OtherWork
from moeflow.planner.hardware.pass_bench import NO_ENGINE, EngineTimes, measure_engine, median_times

OnStep = Callable[[str], None]  # called with the current measurement

NUM_ROUNDS: Final = 3
MAX_ROUNDS: Final = 6  # where others are at work,
LONGEST_S: Final = 40.0  # and no more once they took so long
NUM_GLANCES: Final = 10  # samples of the roofs that identify a machine
GLANCE_S: Final = 0.1  # between them
LIKENESS: Final = 1.25  # ratio of speeds that pass for the same
MIN_UNCERTAINTY: Final = 0.12
GENERAL: Final = (
    *(
        KernelShape(kernel, dtype, sizes)
        for dtype in WEIGHT_FORMATS
        for kernel, sizes in (("linear", (2048, 1024)), ("experts", (16, 2, 1024, 768)))
    ),
    *(KernelShape("attention", dtype, (16, 4, 64)) for dtype in ("float32", "bfloat16", "int8")),
    KernelShape("sampling", "float32", (32000,)),
    ROW_OPERATIONS,
)


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

    `folder` is on the disk that counts. Blocks: for about 15 seconds, twice that while others are at work.
    Raises: OSError if nothing can be written there.
    """
    rounds = Rounds(num_threads, THOROUGH)
    wanted = list(dict.fromkeys((*GENERAL, *shapes)))
    with disk_bench(folder) as disk:
        for round_name in rounds.until_calm():
            on_step(f"disk, {round_name}")
            disk.sample()
            if extension.is_available():
                rounds.beside(disk)
            rounds.run(wanted, lambda what, name=round_name: on_step(f"{what}, {name}"))  # type: ignore[misc]
    machine = rounds.machine(name, ram_bytes)
    how = f"measured by moeflow: {num_threads} threads, {extension.isa_name() if extension.is_available() else 'torch'}"
    return with_disk(replace(machine, sources=(("all", how),)), folder, disk)


def with_disk(machine: Machine, folder: Path, bench: DiskBench) -> Machine:
    """Return a machine with the disk that a folder is on, as it was sampled."""
    free, link = os.statvfs(folder), bench.link()
    disk = MemoryLevel(
        name=DISK, capacity_bytes=max(free.f_bavail * free.f_frsize, 1), read_bytes_per_s=link.peak_bytes_per_s
    )
    ram = machine.level(RAM)
    ram = replace(ram, processor=replace(processor_of(ram), read_overlap=bench.overlap))
    return replace(machine, levels=(disk, ram), links=(*machine.links, link))


def measure_kernels(
    machine: Machine, shapes: Iterable[KernelShape], *, num_threads: int, on_step: OnStep = lambda _: None
) -> Machine:
    """Return the machine with the kernels' efficiency on more shapes, as far as they are not known yet."""
    known = {(it.kernel, it.dtype, it.values) for it in processor_of(machine.level(RAM)).efficiencies}
    missing = [shape for shape in shapes if (shape.kernel, shape.dtype, shape.values) not in known]
    if not missing or not extension.is_available():
        return machine
    rounds = Rounds(num_threads, THOROUGH)
    for _ in rounds.until_calm():
        rounds.run(missing, on_step, of_kernels_only=True)
    machine = replace(machine, other_work=max(machine.other_work, rounds.other_work))
    return with_efficiencies(machine, rounds.efficiencies())


def is_as_measured(machine: Machine, num_threads: int) -> bool:
    """Return whether memory and processor are about as fast as they were when the machine was measured: a glance."""
    level = machine.level(RAM)
    bench = KernelBench(num_threads, THOROUGH)
    samples = []
    with bench.threads():
        for _ in range(NUM_GLANCES):
            samples.append(bench.roofs())
            time.sleep(GLANCE_S)
    roofs = _median(samples)
    pairs = [(level.read_bytes_per_s, roofs.read)]
    pairs += [(processor_of(level).peak(dtype), peak) for dtype, peak in roofs.peaks.items()]
    return all(max(pair) <= LIKENESS * min(pair) for pair in pairs)


@dataclass(frozen=True, slots=True)
class _Round:
    roofs: BestRates  # the median of its samples
    shares: tuple[tuple[KernelWork, float], ...]  # of these roofs
    other_work: float
    engine: EngineTimes


class Rounds:
    """Measurements of the same things at several times; the calmest count."""

    def __init__(self, num_threads: int, effort: Effort, num_kept: int = NUM_ROUNDS) -> None:
        self._bench = KernelBench(num_threads, effort)
        self._num_kept = num_kept
        self._all: list[_Round] = []

    def until_calm(self) -> Iterator[str]:
        """Yield the name of a round to run, until enough were calm or too many were not."""
        began_s = time.monotonic()
        for number in range(1, MAX_ROUNDS + 1):
            yield f"{number} of {max(number, NUM_ROUNDS)}"
            is_calm = sum(it.other_work < DISTURBING for it in self._all) >= NUM_ROUNDS
            if is_calm or (number >= NUM_ROUNDS and time.monotonic() - began_s > LONGEST_S):
                return

    @property
    def _kept(self) -> list[_Round]:
        return sorted(self._all, key=lambda it: it.other_work)[: self._num_kept]

    @property
    def other_work(self) -> float:
        """Share of the processor that others had in the rounds that count."""
        return round(statistics.median(it.other_work for it in self._kept), 3)

    def beside(self, disk: DiskBench) -> None:
        """Have a disk sample how far its reads and computing go on at the same time. Raises: OSError."""
        with self._bench.threads():
            disk.sample_overlap(self._bench.compute)

    def run(self, shapes: Iterable[KernelShape], on_step: OnStep, *, of_kernels_only: bool = False) -> None:
        """Measure everything again: memory, arithmetic, kernels, and the other time of passes."""
        on_step("memory and arithmetic")
        others, bench = OtherWork(), self._bench
        engine = NO_ENGINE
        with bench.threads():
            samples, found = [bench.roofs()], []
            for shape in parts_of(shapes, bench.effort) if extension.is_available() else ():
                on_step(f"{shape.kernel} in {shape.dtype}")
                found += bench.measure(shape)
                if bench.effort.watches_roofs:
                    samples.append(bench.roofs())
            if extension.is_available() and not of_kernels_only:
                on_step("passes")
                engine = measure_engine(bench.chill, bench.effort.num_passes, bench.effort.passes_s)
        roofs = _median(samples)
        level = _level(roofs, NO_ENGINE, ram_bytes=1)
        shares = tuple((work, work_seconds(level, work) / seconds) for work, seconds in found)
        self._all.append(_Round(roofs, shares, others.share, engine))

    def machine(self, name: str, ram_bytes: int) -> Machine:
        """Return memory, processor and kernels, by the median of the rounds: a machine without a disk."""
        roofs, engine = _median([it.roofs for it in self._kept]), median_times([it.engine for it in self._kept])
        machine = Machine(
            name=name,
            levels=(_level(roofs, engine, ram_bytes),),
            links=(),
            uncertainty=self.uncertainty,
            measured_at=datetime.now(UTC).isoformat(timespec="minutes"),
            other_work=self.other_work,
        )
        return with_efficiencies(machine, self.efficiencies())

    def efficiencies(self) -> list[KernelEfficiency]:
        """Return what share of the roofs each kernel reached, by the median of the rounds."""
        found: dict[KernelWork, list[float]] = {}
        for work, share in (pair for one in self._kept for pair in one.shares):
            found.setdefault(work, []).append(share)
        return [
            KernelEfficiency(
                kernel=work.kernel,
                dtype=work.dtype,
                rows=round(work.rows, 3),
                share=statistics.median(shares),
                values=work.values,
            )
            for work, shares in found.items()
        ]

    @property
    def uncertainty(self) -> float:
        """How far the rounds' roofs lay apart, relative; above 1 if one round's were more than twice another's.

        Of rounds that a few are kept of, all count. Not less than the spread within a round.
        """
        roofs = [it.roofs for it in (self._kept if self._num_kept > 1 else self._all)]
        series = [[it.read for it in roofs]]
        series += [[it.peaks[dtype] for it in roofs] for dtype in roofs[0].peaks]
        return max(MIN_UNCERTAINTY, *(max(values) / min(values) - 1 for values in series))


def _median(samples: Sequence[BestRates]) -> BestRates:
    peaks = {dtype: statistics.median(it.peaks[dtype] for it in samples) for dtype in samples[0].peaks}
    return BestRates(statistics.median(it.read for it in samples), peaks)


def _level(roofs: BestRates, engine: EngineTimes, ram_bytes: int) -> MemoryLevel:
    processor = Processor(name=_processor_name(), peak_flops_per_s=tuple(roofs.peaks.items()), **asdict(engine))
    return MemoryLevel(name=RAM, capacity_bytes=ram_bytes, read_bytes_per_s=roofs.read, processor=processor)


def with_efficiencies(machine: Machine, more: Iterable[KernelEfficiency]) -> Machine:
    """Return a machine with more known kernels."""
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
