"""One MoE layer on rank processes, measured in each layout of its experts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any, Final, Literal

import click

from moeflow.cli.bench.output import Recorder, result_options
from moeflow.cli.help import Command
from moeflow.cli.params import NEW_PICTURE
from moeflow.cli.progress import bar, steps
from moeflow.core.cache_dir import cache_folder
from moeflow.parallel.placement.layouts import CAPACITY_DROPLESS, LAYOUTS, REPLICATED
from moeflow.planner.hardware.host import host_resources
from moeflow.planner.hardware.this_machine import this_machine
from studies.harness.command import run_study
from studies.harness.records import recorder
from studies.parallel.case import Case, LayerShape
from studies.parallel.plots import plot_parallel
from studies.parallel.prediction import kernel_shapes, ranks_at_once
from studies.parallel.run import ParallelStudy
from studies.parallel.tables import parallel_tables

MEASURED: Final = tuple(name for name in LAYOUTS if name != REPLICATED)  # which exchanges nothing
PRESETS: Final[dict[str, dict[str, Any]]] = {  # sizes that models have, as fields of a shape
    "switch-base": {"top_k": 1, "hidden": 768, "width": 3072, "is_gated": False},  # the encoders of the study
    "builtin": {"top_k": 2, "hidden": 576, "width": 1536, "is_gated": True},
}

EPILOG = """\b
Examples:
  python -m studies.parallel
      32 experts of Switch Transformer's size on 4 ranks, skew 0.6
  python -m studies.parallel --experts 128 --tokens 2048 --validate
      and is it what the simulator predicts?
  python -m studies.parallel --experts 8 --experts 32 --experts 128 \\
      --skew 0 --skew 0.6 --skew 0.9 --out docs/studies/results/parallel.jsonl
      a grid

Each rank is a process with one thread and tokens of its own. Ranks may share cores: what counts is each one's
processor time, and the critical path, which is the slowest rank's time summed over routing, dispatch, experts and
combine. Layouts: "expert" has whole experts, by index; "expert-by-load" places them by an earlier batch, with a slot
more a rank for replicas; "sliced" gives each rank a slice of every expert. "capacity" is the baseline, as DeepSpeed's:
each expert's rows are padded to a fixed number and what is beyond is dropped; "capacity-dropless", which all are
compared with, pads to the largest load. All but "sliced" give one process's sums to the bit. Layouts that other
packages add place whole experts as they say."""


@click.command(cls=Command, epilog=EPILOG, context_settings={"show_default": True})
@click.option("--preset", type=click.Choice(list(PRESETS)), default="switch-base", help="Whose experts.")
@click.option("--hidden", type=click.IntRange(1), help="Width of a token's row.  [default: the preset's]")
@click.option("--width", type=click.IntRange(1), help="Hidden units of an expert.  [default: the preset's]")
@click.option("--top-k", type=click.IntRange(1), help="Experts a token.  [default: the preset's]")
@click.option("--gated/--not-gated", "is_gated", default=None, help="Three matrices or two.  [default: the preset's]")
@click.option("--weights", type=click.Choice(["float32", "bfloat16"]), default="bfloat16", help="Their format.")
@click.option("--ranks", type=click.IntRange(1, 64), default=4, help="Processes that share the experts.")
@click.option("--experts", type=click.IntRange(1, 4096), multiple=True, default=(32,), help="May be given often.")
@click.option(
    "--tokens",
    type=click.IntRange(1, 1 << 20),
    multiple=True,
    default=(1024,),
    help="Of each rank; may be given often.",
)
@click.option(
    "--skew",
    "skews",
    type=click.FloatRange(0, 1),
    multiple=True,
    default=(0.6,),
    help="Share of the tokens that go to hot experts; may be given often.",
)
@click.option("--skew-experts", type=click.IntRange(1), help="How many are hot.  [default: a tenth of them]")
@click.option(
    "--layout", "layouts", type=click.Choice(MEASURED), multiple=True, default=MEASURED, help="May be given often."
)
@click.option(
    "--capacity-factor", type=click.FloatRange(0, 1e6, min_open=True), default=1.25, help="Of the layout that drops."
)
@click.option("--repeats", type=click.IntRange(1), default=5, help="Measurements of each, after a warm-up.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Of tokens and routing.")
@click.option("--validate", is_flag=True, help="Predict the same, for this machine, which is measured for it.")
@click.option("--plot", type=NEW_PICTURE, help="Draw speed-ups, or of a single case its sections, to this PNG.")
@result_options
def parallel(
    preset: str,
    hidden: int | None,
    width: int | None,
    top_k: int | None,
    is_gated: bool | None,
    weights: Literal["float32", "bfloat16"],
    ranks: int,
    experts: tuple[int, ...],
    tokens: tuple[int, ...],
    skews: tuple[float, ...],
    skew_experts: int | None,
    layouts: tuple[str, ...],
    capacity_factor: float,
    repeats: int,
    seed: int,
    validate: bool,
    plot: Path | None,
    as_json: bool,
    out: Path | None,
) -> int:
    """Measure how an MoE layer's experts are best laid out over ranks, as routing becomes more skewed."""
    given = {"hidden": hidden, "width": width, "top_k": top_k, "is_gated": is_gated}
    sizes = {**PRESETS[preset], **{name: value for name, value in given.items() if value is not None}}
    cases = [
        Case(
            layer=LayerShape(num_ranks=ranks, num_experts=num_experts, weights=weights, **sizes),
            num_tokens=(num_tokens,) * ranks,
            router_skew=skew,
            num_experts_skew=skew_experts or max(num_experts // 10, 1),
            capacity_factor=capacity_factor,
            seed=seed,
        )
        for num_experts, num_tokens, skew in product(
            dict.fromkeys(experts), dict.fromkeys(tokens), dict.fromkeys(skews)
        )
    ]
    kept = recorder("parallel", out, as_json=as_json)
    names = tuple(name for name in MEASURED if name in layouts or name == CAPACITY_DROPLESS)
    try:
        measure(cases, names, repeats, kept, machine=measured_machine(cases) if validate else None)
        interrupted = False
    except KeyboardInterrupt:
        interrupted = True
    kept.show(parallel_tables)
    if kept.records and plot is not None:
        plot_parallel(kept.records, plot)
        click.echo(f"drew {plot}", err=True)
    return 130 if interrupted else 0


def measure(cases: Sequence[Any], layouts: tuple[str, ...], repeats: int, kept: Recorder, machine: Any | None) -> None:
    """Measure all cases, each kept as soon as it is there."""
    study = ParallelStudy(layouts=layouts, repeats=repeats, machine=machine)
    with bar(study.num_passes(cases)) as shown, closing(study.run(cases, shown.advance, shown.say)) as results:
        for fields in results:
            kept.add(fields, seed=fields["seed"], threads=1)


def measured_machine(cases: Sequence[Any]) -> Any:
    """Return this machine as the threads find it that run at once, with the shapes of all cases."""
    shapes = dict.fromkeys(shape for case in cases for shape in kernel_shapes(case.layer))
    host = host_resources()
    num_threads = ranks_at_once(cases[0].layer.num_ranks)
    with steps("measuring this machine") as say:
        return this_machine(
            cache_folder(None), num_threads=num_threads, ram_bytes=host.total_bytes, shapes=tuple(shapes), on_step=say
        )


if __name__ == "__main__":
    run_study(parallel)
