"""Claim: of MoE-Lightning's tables 4 and 5, 18 of 20 figures are predicted within 35%; of figure 7, 18 of 22.

Mixtral 8x7B in float16 on the machines `paper-s1` (T4) and `paper-s2` (L4). Each system is its pipeline with the
published micro-batch (mu) and number of them, prompts padded to the longest. No figure of a whole model went into a
prediction. `TERMS` are their foundations, from data sheets alone to all of them:

- *data sheets*: every kernel at its roof. It is an upper bound rather than a prediction.
  + Products run at the base clock: boost clocks exceed the 70 and 72 W of these GPUs.
  + Error-correcting codes take 1 of 16 bytes of device memory, and as much of its bandwidth.
  + Both hosts have PCIe 3.0 (Xeons of 2.3 and 2.2 GHz), also that of the L4. The link is slower by what its packets
    need beside 128 bytes of payload.
- *measured parts*: the machine files, with measurements of links, memory and large products.
- *tiles*: the systems' own kernel for experts (`kernels.py`).
- *copies*: the systems' own attention (`kernels.py`).
- *loop*: FlexGen as its source has it (`flexgen_loop.py`).
- *cache*: small tiles wait for the L4's level 2 cache (`kernels.py`).
- *whole experts*: MoE-Lightning keeps whole experts of a layer on the device (`int(num_local_experts * policy.wg)` in
  `execution_engine.py`). Its search finds a share under 1/8 in all settings of Mixtral, so all experts are streamed.

One decision was made with tables 4 and 5 known: on the T4, reading and computing of the experts' kernel add up, where
the larger of them alone is the other limit. Figure 7 was predicted after that, once. The terms *cache* and *whole
experts* were looked for with all padded figures known, because the L4 was slower than predicted. Their constants come
from other sources. Without padding, figure 7 was predicted after that, once.

The policies of FlexGen are those of its scripts in the authors' artifact (github.com/caoshiyi/artifacts, branch
asplos25), which also has figure 7 in numbers. Those of MoE-Lightning(p) in figure 7 follow from its times and the
common divisor of its numbers of sequences; the artifact's search finds the same. Without padding they are those of its
README. DeepSpeed keeps no weights on the device; FlexGen with MoE-Lightning's policy, as many as fit.
`several_devices.py` has the figures of several T4s (S6 to S9) and of two A100s (figure 10).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Final

import msgspec

from moeflow.core.hardware import DEVICE, LinkRate, Machine, MemoryLevel
from moeflow.core.plan import Workload
from moeflow.models.registry import read_bare_config
from moeflow.pipeline.catalog import PIPELINES, MakeTasks
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.hardware.machine_files import load_machine
from moeflow.planner.model_files import shipped_models
from moeflow.planner.simulator.pipeline_run import PipelineRun, make_policy
from studies.paper.flexgen_loop import flexgen_host_loop, flexgen_loop
from studies.paper.kernels import DEEPSPEED_KERNELS, FLEXGEN_KERNELS, LIGHTNING_KERNELS, Kernels, with_kernels
from studies.paper.several_devices import FORMATS, resident_share

BAR: Final = 0.35  # of the published figure
TERMS: Final = (
    "data sheets",
    "measured parts",
    "tiles",
    "copies",
    "loop",
    "cache",
    "whole experts",
)  # each in addition to the earlier ones
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
    kernels: Kernels
    make_tasks: MakeTasks | None = None  # None: the pipeline's
    keeps_whole_experts: bool = False  # on the device, of each layer


@dataclass(frozen=True, slots=True)
class Published:
    """A figure of the paper."""

    system: System
    micro_batch: int  # mu
    num_micro_batches: int  # N / mu
    tokens_per_s: float
    resident_share: float | None = None  # of weights on the device; None: as many as fit


@dataclass(frozen=True, slots=True)
class Cell:
    """What is compared: systems on one machine with one workload."""

    source: str  # where it was published
    title: str
    machine: str
    prompt_len: int  # on average
    gen_len: int
    rows: tuple[Published, ...]
    max_prompt_len: int | None = None  # None: all are padded to the same length


FLEXGEN_C = System("FlexGen(c)", "flexgen-cpu-attention", FLEXGEN_KERNELS, flexgen_host_loop)
FLEXGEN = System("FlexGen", "flexgen", FLEXGEN_KERNELS, flexgen_loop)
DEEPSPEED = System("DeepSpeed", "zero-inference", DEEPSPEED_KERNELS)
LIGHTNING = System("MoE-Lightning(p)", "cgopipe", LIGHTNING_KERNELS, keeps_whole_experts=True)

TABLES: Final = "tables 4 and 5"
FIGURE_7: Final = "figure 7"
UNPADDED: Final = "figure 7, unpadded"

# Machine, tokens of an answer; FlexGen's mu, N / mu, share of weights on the device, and tokens/s with attention on the
# host and on the device; mu, N / mu and tokens/s of MoE-Lightning(p). Table 5 has the rest.
_FIGURE_7: Final = (
    ("paper-s1", 32, (32, 40, 0.07, 9.8, 12.1), (36, 14, 15.609)),
    ("paper-s1", 64, (16, 78, 0.08, 9.4, 12.3), (36, 14, 23.997)),
    ("paper-s1", 128, (8, 139, 0.08, 7.2, None), None),
    ("paper-s1", 256, (8, 113, 0.08, 6.8, 9.6), (36, 14, 33.938)),
    ("paper-s2", 32, (64, 21, 0.12, 17.5, 29.2), (68, 16, 53.714)),
    ("paper-s2", 64, (64, 20, 0.12, 18.9, 34.9), (68, 15, 67.369)),
    ("paper-s2", 128, (64, 18, 0.12, 20.0, 37.2), (68, 13, 78.972)),
    ("paper-s2", 256, (32, 30, 0.14, 15.9, 28.8), (68, 11, 78.6)),
)


# Machine, tokens of an answer; mu, N / mu and tokens/s of MoE-Lightning, whose prompts have 77 tokens on average.
_UNPADDED: Final = (
    ("paper-s1", 32, (164, 19, 63.047)),
    ("paper-s1", 64, (164, 19, 101.328)),
    ("paper-s1", 128, (164, 14, 97.735)),
    ("paper-s1", 256, (100, 15, 96.867)),
    ("paper-s2", 32, (324, 14, 202.996)),
    ("paper-s2", 64, (228, 16, 294.504)),
    ("paper-s2", 128, (164, 16, 217.541)),
    ("paper-s2", 256, (132, 12, 167.922)),
)


def _unpadded() -> Iterator[Cell]:
    for machine, gen_len, lightning in _UNPADDED:
        title = f"MTBench with {gen_len} tokens, {machine[-2:].upper()}, unpadded (figure 7)"
        yield Cell(UNPADDED, title, machine, 77, gen_len, (Published(LIGHTNING, *lightning),), 418)


def _figure_7() -> Iterator[Cell]:
    for machine, gen_len, (micro_batch, number, share, on_host, on_device), lightning in _FIGURE_7:
        rows = [Published(FLEXGEN_C, micro_batch, number, on_host, share)]
        if on_device is not None:
            rows.append(Published(FLEXGEN, micro_batch, number, on_device, share))
        if lightning is not None:
            rows.append(Published(LIGHTNING, *lightning))
        title = f"MTBench with {gen_len} tokens, {machine[-2:].upper()} (figure 7)"
        yield Cell(FIGURE_7, title, machine, 418, gen_len, tuple(rows))


CELLS = (
    Cell(
        TABLES,
        "synthetic reasoning, S1 (table 4)",
        "paper-s1",
        256,
        50,
        (
            Published(FLEXGEN_C, 32, 61, 16.903, 0.07),
            Published(FLEXGEN, 32, 61, 22.691, 0.07),
            Published(DEEPSPEED, 102, 1, 11.832, 0.0),
            Published(LIGHTNING, 36, 26, 26.349),
        ),
    ),
    Cell(
        TABLES,
        "synthetic reasoning, S2 (table 4)",
        "paper-s2",
        256,
        50,
        (
            Published(FLEXGEN_C, 64, 33, 20.015, 0.14),
            Published(FLEXGEN, 64, 33, 50.138, 0.14),
            Published(DEEPSPEED, 156, 1, 18.589, 0.0),
            Published(LIGHTNING, 100, 15, 105.29),
        ),
    ),
    Cell(
        TABLES,
        "summarization, S1 (table 4)",
        "paper-s1",
        1984,
        64,
        (
            Published(FLEXGEN_C, 3, 92, 2.614, 0.07),
            Published(FLEXGEN, 3, 92, 3.868, 0.07),
            Published(DEEPSPEED, 8, 1, 0.965, 0.0),
            Published(LIGHTNING, 4, 19, 4.52),
        ),
    ),
    Cell(
        TABLES,
        "summarization, S2 (table 4)",
        "paper-s2",
        1984,
        64,
        (
            Published(FLEXGEN_C, 8, 36, 4.307, 0.12),
            Published(FLEXGEN, 8, 36, 7.14, 0.12),
            Published(DEEPSPEED, 12, 1, 1.447, 0.0),
            Published(LIGHTNING, 8, 36, 12.393),
        ),
    ),
    Cell(
        TABLES,
        "MTBench with 128 tokens, S1 (table 5)",
        "paper-s1",
        418,
        128,
        (
            Published(FLEXGEN, 8, 139, 9.5, 0.08),
            Published(FLEXGEN, 36, 14, 16.816),
            Published(FLEXGEN, 36, 31, 20.654),
            Published(LIGHTNING, 36, 14, 30.12),
        ),
    ),
    *_figure_7(),
    *_unpadded(),
)


def predict(cell: Cell, row: Published, terms: int = len(TERMS)) -> PipelineRun:
    """Return a row of a cell as a job of the simulator, with the first so many terms."""
    system = row.system
    machine, pipeline, known = load_machine(cell.machine), PIPELINES[system.pipeline], TERMS[:terms]
    if terms == 1:
        machine = as_printed(machine)
    elif "tiles" in known:
        usual = Kernels(has_fused_experts=system.kernels.has_fused_experts)
        kernels = system.kernels if "copies" in known else usual
        machine = with_kernels(machine, replace(kernels, waits_for_cache="cache" in known))
    if "loop" in known and system.make_tasks is not None:
        pipeline = msgspec.structs.replace(pipeline, make_tasks=system.make_tasks)
    costs = ModelCosts(read_bare_config(shipped_models()["mixtral-8x7b"]), FORMATS)
    workload = Workload(
        prompt_len=cell.prompt_len, gen_len=cell.gen_len, max_prompt_len=cell.max_prompt_len or cell.prompt_len
    )
    has_whole = system.keeps_whole_experts and "whole experts" in known
    policy = make_policy(
        pipeline,
        machine,
        costs,
        workload,
        batch_size=row.micro_batch * row.num_micro_batches,
        micro_batch=row.micro_batch,
        resident_share=resident_share(costs, 0) if has_whole else row.resident_share,
    )
    return PipelineRun(pipeline=pipeline, machine=machine, costs=costs, workload=workload, policy=policy)


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


def pairs_in_order(cell: Cell, predicted: Sequence[float]) -> tuple[int, int]:
    """Return how many pairs of figures are predicted in the published order, and how many there are."""
    known = [(row.tokens_per_s, speed) for row, speed in zip(cell.rows, predicted, strict=True)]
    pairs = list(combinations(known, 2))
    return sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs), len(pairs)


def _speeds(cell: Cell, row: Published, stages: Sequence[int]) -> dict[int, float]:
    """Return the predicted tokens/s with each number of terms. A term that changes nothing is not simulated again."""
    runs = [predict(cell, row, terms) for terms in stages]
    return {terms: runs[runs.index(run)].tokens_per_s for terms, run in zip(stages, runs, strict=True)}


def predictions(on_cell: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """Return every published figure with its predictions. `on_cell` gets the title of each cell first.

    Figure 7 has the first term and all of them, and without padding the last ones.
    """
    found = []
    for cell in CELLS:
        on_cell(cell.title)
        stages = {TABLES: range(1, len(TERMS) + 1), FIGURE_7: (1, len(TERMS))}.get(cell.source, (5, len(TERMS)))
        by_row = [_speeds(cell, row, stages) for row in cell.rows]
        predicted = {TERMS[terms - 1]: [speeds[terms] for speeds in by_row] for terms in stages}
        rows = [
            {
                "system": row.system.name,
                "micro_batch": row.micro_batch,
                "num_micro_batches": row.num_micro_batches,
                "published": row.tokens_per_s,
                "predicted": {term: round(speeds[number], 3) for term, speeds in predicted.items()},
            }
            for number, row in enumerate(cell.rows)
        ]
        orders = {term: pairs_in_order(cell, speeds) for term, speeds in predicted.items()}
        found.append({"source": cell.source, "title": cell.title, "rows": rows, "pairs_in_order": orders})
    return found
