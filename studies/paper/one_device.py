"""Claim: of the figures of MoE-Lightning's tables 4 and 5 that nothing was fitted to, 9 of 10 are predicted within 35%.

Mixtral 8x7B in float16 on the machines `paper-s1` (T4) and `paper-s2` (L4). Each system is its pipeline with the
published micro-batch (mu) and number of them, prompts padded to the longest. Two columns:

- *as described*: the machine files as they are. Some of what they assume was taken from these very tables, and how
  FlexGen attends on the host is an assumption of ours. A figure that went into that is marked and **does not count**.
  + The L4's link of 12 GB/s comes from DeepSpeed's figures, and none of them counts.
  + The share of the roof that experts reach comes from one figure of MoE-Lightning(p) for each of the two GPUs.
  + FlexGen(c) attends in torch, over keys and values repeated for the 4 query heads that share them. A
    number has two bytes. The copy would move 2 + 8 + 8 bytes, since memory is read before it is written. Its widening
    to float32 takes 8 + 16 + 16, and the product 16. Transposed keys take 16 + 16 + 16 for every other number. That is
    98 bytes, or 49 times the stored ones. It has not been measured, so none of its figures counts.
- *data sheets*: nothing fitted, nothing assumed. Every kernel is at its roof. All figures count; it is an upper bound
  rather than a prediction.
  + Products run at the base clock: boost clocks exceed the 70 and 72 W of these GPUs.
  + Error-correcting codes take 1 of 16 bytes of device memory, and as much of its bandwidth.
  + Both hosts have PCIe 3.0 (Xeons of 2.3 and 2.2 GHz), also that of the L4. The link is slower by what its packets
    need beside 128 bytes of payload.

FlexGen was once taken to read 9 times the bytes in its attention on the device, which nobody has measured either. With
that, all of its figures were within 35%; it was left out when figures that rest on assumptions ceased to count, with
both results known. One figure is 37% off without it.

DeepSpeed keeps no weights on the device; the others as many as fit. What was published of several T4s (S6 to S9) and of
two A100s (figure 10) is in `several_devices.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Final

from moeflow.core.hardware import DEVICE, LinkRate, Machine, MemoryLevel
from moeflow.core.plan import Workload
from moeflow.models.registry import read_bare_config
from moeflow.pipeline.catalog import PIPELINES
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.hardware.machine_files import load_machine
from moeflow.planner.model_files import shipped_models
from moeflow.planner.simulator.pipeline_run import PipelineRun, make_policy
from studies.paper.several_devices import FORMATS

BAR: Final = 0.35  # of the published figure
PAYLOAD_BYTES: Final = 128  # of a packet, which every PCIe device accepts
PACKET_BYTES: Final = PAYLOAD_BYTES + 12 + 4 + 4  # with header, framing and check sum
# 16 lanes of PCIe 3.0, 8 GT/s each in one direction, less the 2 of 130 bits that encode.
PRINTED_LINK: Final = 16 * 8e9 / 8 * 128 / 130 * PAYLOAD_BYTES / PACKET_BYTES
ECC_SHARE: Final = 15 / 16  # of device memory and its bandwidth, for data
CLOCK_SHARES: Final = {"paper-s1": 585 / 1590, "paper-s2": 795 / 2040}  # MHz: base and boost clock, which peaks are for


@dataclass(frozen=True, slots=True)
class System:
    """One of those that were measured."""

    name: str
    pipeline: str
    slower: Mapping[str, float] = field(default_factory=dict)
    resident_share: float | None = None  # None: as many weights as fit


@dataclass(frozen=True, slots=True)
class Published:
    """A figure of the paper."""

    system: System
    micro_batch: int  # mu
    num_micro_batches: int  # N / mu
    tokens_per_s: float
    used_for: str = ""  # values taken from it, or assumed for it; it does not count then

    @property
    def counts(self) -> bool:
        """Return whether a prediction of it is one."""
        return not self.used_for


@dataclass(frozen=True, slots=True)
class Cell:
    """What is compared: systems on one machine with one workload."""

    title: str
    machine: str
    prompt_len: int  # of the longest, to which all are padded
    gen_len: int
    rows: tuple[Published, ...]


FLEXGEN_C = System("FlexGen(c)", "flexgen-cpu-attention", {"cpu_attention": 49.0})
FLEXGEN = System("FlexGen", "flexgen")
DEEPSPEED = System("DeepSpeed", "zero-inference", resident_share=0.0)
LIGHTNING = System("MoE-Lightning(p)", "cgopipe")

LINK = "the L4's link"
EXPERTS = "its GPU's share of the roof for experts"
ASSUMED = "how torch attends on the host"

CELLS = (
    Cell(
        "synthetic reasoning, S1 (table 4)",
        "paper-s1",
        256,
        50,
        (
            Published(FLEXGEN_C, 32, 61, 16.903, ASSUMED),
            Published(FLEXGEN, 32, 61, 22.691),
            Published(DEEPSPEED, 102, 1, 11.832, LINK),
            Published(LIGHTNING, 36, 26, 26.349),
        ),
    ),
    Cell(
        "synthetic reasoning, S2 (table 4)",
        "paper-s2",
        256,
        50,
        (
            Published(FLEXGEN_C, 64, 33, 20.015, ASSUMED),
            Published(FLEXGEN, 64, 33, 50.138),
            Published(DEEPSPEED, 156, 1, 18.589, LINK),
            Published(LIGHTNING, 100, 15, 105.29, EXPERTS),
        ),
    ),
    Cell(
        "summarization, S1 (table 4)",
        "paper-s1",
        1984,
        64,
        (
            Published(FLEXGEN_C, 3, 92, 2.614, ASSUMED),
            Published(FLEXGEN, 3, 92, 3.868),
            Published(DEEPSPEED, 8, 1, 0.965, LINK),
            Published(LIGHTNING, 4, 19, 4.52),
        ),
    ),
    Cell(
        "summarization, S2 (table 4)",
        "paper-s2",
        1984,
        64,
        (
            Published(FLEXGEN_C, 8, 36, 4.307, ASSUMED),
            Published(FLEXGEN, 8, 36, 7.14),
            Published(DEEPSPEED, 12, 1, 1.447, LINK),
            Published(LIGHTNING, 8, 36, 12.393),
        ),
    ),
    Cell(
        "MTBench with 128 tokens, S1 (table 5)",
        "paper-s1",
        418,
        128,
        (
            Published(FLEXGEN, 8, 139, 9.5),
            Published(FLEXGEN, 36, 14, 16.816),
            Published(FLEXGEN, 36, 31, 20.654),
            Published(LIGHTNING, 36, 14, 30.12, EXPERTS),
        ),
    ),
)


def predict(cell: Cell, row: Published, *, from_data_sheets: bool = False) -> PipelineRun:
    """Return a row of a cell as a job of the simulator."""
    machine = load_machine(cell.machine)
    if from_data_sheets:
        machine = as_printed(machine)
    costs = ModelCosts(read_bare_config(shipped_models()["mixtral-8x7b"]), FORMATS)
    workload = Workload(prompt_len=cell.prompt_len, gen_len=cell.gen_len, max_prompt_len=cell.prompt_len)
    pipeline = PIPELINES[row.system.pipeline]
    policy = make_policy(
        pipeline,
        machine,
        costs,
        workload,
        batch_size=row.micro_batch * row.num_micro_batches,
        micro_batch=row.micro_batch,
        resident_share=row.system.resident_share,
    )
    slower = {} if from_data_sheets else row.system.slower
    return PipelineRun(pipeline=pipeline, machine=machine, costs=costs, workload=workload, policy=policy, slower=slower)


def as_printed(machine: Machine) -> Machine:
    """Return a machine whose kernels reach their roofs at the base clock, and whose link is as fast at any size."""
    levels = tuple(_level_as_printed(level, CLOCK_SHARES[machine.name]) for level in machine.levels)
    rates = (LinkRate(transfer_bytes=1, bytes_per_s=PRINTED_LINK),)
    links = tuple(replace(it, rates=rates) if DEVICE in (it.source, it.target) else it for it in machine.links)
    return replace(machine, levels=levels, links=links)


def _level_as_printed(level: MemoryLevel, clock_share: float) -> MemoryLevel:
    if level.processor is None:
        return level
    processor = replace(level.processor, efficiencies=(), default_efficiency=1.0)
    if level.name != DEVICE:
        return replace(level, processor=processor)
    peaks = tuple((dtype, peak * clock_share) for dtype, peak in processor.peak_flops_per_s)
    processor = replace(processor, peak_flops_per_s=peaks)
    return replace(level, processor=processor, read_bytes_per_s=level.read_bytes_per_s * ECC_SHARE)


def pairs_in_order(cell: Cell, predicted: Sequence[float], *, all_count: bool) -> tuple[int, int]:
    """Return how many pairs of figures that count are predicted in the published order, and how many there are."""
    known = [
        (row.tokens_per_s, speed) for row, speed in zip(cell.rows, predicted, strict=True) if all_count or row.counts
    ]
    pairs = list(combinations(known, 2))
    return sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs), len(pairs)


def predictions(on_cell: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """Return every figure beside both predictions, cell by cell; each one's title is told before."""
    found = []
    for cell in CELLS:
        on_cell(cell.title)
        described, printed = (
            [predict(cell, row, from_data_sheets=sheets).tokens_per_s for row in cell.rows] for sheets in (False, True)
        )
        rows = [
            {
                "system": row.system.name,
                "micro_batch": row.micro_batch,
                "num_micro_batches": row.num_micro_batches,
                "published": row.tokens_per_s,
                "described": round(one, 3),
                "data_sheets": round(other, 3),
                "used_for": row.used_for,
            }
            for row, one, other in zip(cell.rows, described, printed, strict=True)
        ]
        orders = {
            "described": pairs_in_order(cell, described, all_count=False),
            "data_sheets": pairs_in_order(cell, printed, all_count=True),
        }
        found.append({"title": cell.title, "rows": rows, "pairs_in_order": orders})
    return found
