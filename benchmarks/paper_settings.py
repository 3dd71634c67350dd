"""Claim: the simulator ranks the systems of MoE-Lightning's tables 4 and 5 as they were measured, and is within 35%.

Mixtral 8x7B in float16 on the machines `paper-s1` (T4) and `paper-s2` (L4), whose files say what is assumed of them:
one share of the roof for each kind of kernel and device, one rate for the link. Each system is its pipeline with the
published micro-batch (mu) and number of them, prompts padded to the longest. What is the system's own beside that:

- FlexGen attends in torch, over keys and values repeated for the 4 query heads that share them. Of each number of two
  bytes, on the host: the copy moves 2 + 8 + 8 bytes (what is written is read first), its widening to float32
  8 + 16 + 16, the product 16, and keys are turned round before, 16 + 16 + 16 for every other number: 98 bytes, 49 times
  what is stored. On the device, which writes without reading: 2 + 8 + 8, 9 times.
- DeepSpeed keeps no weights on the device; the others as many as fit.

    python benchmarks/paper_settings.py
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from moeflow.core.plan import Workload
from moeflow.models.registry import read_bare_config
from moeflow.pipeline.catalog import PIPELINES
from moeflow.planner.machine_files import load_machine
from moeflow.planner.model_costs import Formats, ModelCosts
from moeflow.planner.model_files import shipped_models
from moeflow.simulator.pipeline_run import PipelineRun, make_policy

FORMATS = Formats(matrices="float16", embeddings="float16", kv="float16", activation_bytes=2)
BAR, AIM = 0.35, 0.20


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


@dataclass(frozen=True, slots=True)
class Cell:
    """What is compared: systems on one machine with one workload."""

    title: str
    machine: str
    prompt_len: int  # of the longest, to which all are padded
    gen_len: int
    rows: tuple[Published, ...]


FLEXGEN_C = System("FlexGen(c)", "flexgen-c", {"cpu_attention": 49.0})
FLEXGEN = System("FlexGen", "flexgen", {"device_attention": 9.0})
DEEPSPEED = System("DeepSpeed", "zero-inference", resident_share=0.0)
LIGHTNING = System("MoE-Lightning(p)", "cgopipe")

CELLS = (
    Cell(
        "synthetic reasoning, S1 (table 4)",
        "paper-s1",
        256,
        50,
        (
            Published(FLEXGEN_C, 32, 61, 16.903),
            Published(FLEXGEN, 32, 61, 22.691),
            Published(DEEPSPEED, 102, 1, 11.832),
            Published(LIGHTNING, 36, 26, 26.349),
        ),
    ),
    Cell(
        "synthetic reasoning, S2 (table 4)",
        "paper-s2",
        256,
        50,
        (
            Published(FLEXGEN_C, 64, 33, 20.015),
            Published(FLEXGEN, 64, 33, 50.138),
            Published(DEEPSPEED, 156, 1, 18.589),
            Published(LIGHTNING, 100, 15, 105.29),
        ),
    ),
    Cell(
        "summarization, S1 (table 4)",
        "paper-s1",
        1984,
        64,
        (
            Published(FLEXGEN_C, 3, 92, 2.614),
            Published(FLEXGEN, 3, 92, 3.868),
            Published(DEEPSPEED, 8, 1, 0.965),
            Published(LIGHTNING, 4, 19, 4.52),
        ),
    ),
    Cell(
        "summarization, S2 (table 4)",
        "paper-s2",
        1984,
        64,
        (
            Published(FLEXGEN_C, 8, 36, 4.307),
            Published(FLEXGEN, 8, 36, 7.14),
            Published(DEEPSPEED, 12, 1, 1.447),
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
            Published(LIGHTNING, 36, 14, 30.12),
        ),
    ),
)


def predict(cell: Cell, row: Published) -> PipelineRun:
    """Return a row of a cell as a job of the simulator."""
    machine = load_machine(cell.machine)
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
    return PipelineRun(
        pipeline=pipeline, machine=machine, costs=costs, workload=workload, policy=policy, slower=row.system.slower
    )


def is_ranked_right(cell: Cell, predicted: list[float]) -> bool:
    """Say whether the rows of a cell come in the published order."""
    numbers = range(len(predicted))
    published = sorted(numbers, key=lambda number: cell.rows[number].tokens_per_s)
    return published == sorted(numbers, key=lambda number: predicted[number])


def main() -> None:
    """Print published beside predicted."""
    console = Console(highlight=False, width=100)
    deviations, ranked = [], 0
    for cell in CELLS:
        runs = [predict(cell, row) for row in cell.rows]
        is_right = is_ranked_right(cell, [run.tokens_per_s for run in runs])
        ranked += is_right
        title = f"{cell.title}: tokens/s, ranked {'right' if is_right else 'wrong'}"
        table = Table(
            "", "mu", "N / mu", "published", "predicted", "off by", "busiest", title=title, title_justify="left"
        )
        for row, run in zip(cell.rows, runs, strict=True):
            deviations.append(abs(run.tokens_per_s / row.tokens_per_s - 1))
            table.add_row(*_cells(row, run))
        console.print(table)
    within = [sum(one <= limit for one in deviations) for limit in (BAR, AIM)]
    print(
        f"Ranked right: {ranked} of {len(CELLS)} cells. Of {len(deviations)} figures, {within[0]} within {BAR:.0%}, "
        f"{within[1]} within {AIM:.0%}; median {statistics.median(deviations):.0%}, worst {max(deviations):.0%}."
    )


def _cells(row: Published, run: PipelineRun) -> tuple[str, ...]:
    line = run.middle_step
    busiest = max(line.lanes, key=lambda lane: line.use(lane).busy_s)
    return (
        row.system.name,
        str(row.micro_batch),
        str(row.num_micro_batches),
        f"{row.tokens_per_s:.2f}",
        f"{run.tokens_per_s:.2f}",
        f"{run.tokens_per_s / row.tokens_per_s - 1:+.0%}",
        f"{busiest} {1 - line.use(busiest).idle_share:.0%}",
    )


if __name__ == "__main__":
    main()
