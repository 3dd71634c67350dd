"""`moeflow bench sida`: what knowing a text's experts beforehand is worth to a classifier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from moeflow.bench.records import make_record
from moeflow.cli import lazy
from moeflow.cli.bench.output import keep, repeated_command, result_options, show
from moeflow.cli.options import cache_dir_option
from moeflow.cli.params import NEW_PICTURE
from moeflow.cli.progress import bar, progress_bar
from moeflow.planner.settings import LOSSY_ROUTING

EPILOG = """\b
Examples:
  moeflow train classifier --data train.tsv --out reviews
  moeflow train predictor reviews --data train.tsv
  moeflow bench sida reviews --data dev.tsv --plot sida.png

Measures what was published of SiDA (2310.18859): which experts texts leave idle, how often the network of
`moeflow train predictor` names what routers choose, how right the classifier is with routers and with the network in
their place (--lossy-routing), and how fast it is where only a share of its experts is in memory: layer by layer, with
layers read ahead, on demand, and predicted. All ways but the lossy one must give the same bits, or it ends with an
error. Without a predictor, only what needs none is measured."""


@click.command(epilog=EPILOG)
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--data",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="Texts that nothing has learnt from: a text, a tab and a label a line.",
)
@click.option(
    "--share",
    "shares",
    type=click.IntRange(1, 100),
    multiple=True,
    default=(10, 25, 50),
    show_default=True,
    help="Percent of the experts in memory; may be given often.",
)
@click.option("--texts", "num_texts", type=click.IntRange(10), default=120, show_default=True, help="To time with.")
@click.option(
    "--lossy",
    type=click.Choice(tuple(LOSSY_ROUTING)),
    default="sida",
    show_default=True,
    help="Experts that the network chooses for a token where it does: one, or three.",
)
@click.option("--threads", "num_threads", type=click.IntRange(1), help="CPU threads.  [default: all cores]")
@cache_dir_option
@click.option("--plot", type=NEW_PICTURE, help="Draw it to this PNG.")
@result_options
def sida(
    model: Path,
    data: Path,
    shares: Sequence[int],
    num_texts: int,
    lossy: str,
    num_threads: int | None,
    cache_dir: Path,
    plot: Path | None,
    as_json: bool,
    out: Path | None,
) -> None:
    """Measure what it is worth to know a text's experts beforehand.

    MODEL is a classifier's folder, as `moeflow train classifier` makes it.
    """
    with progress_bar("Packing") as on_bytes:
        study = lazy.SidaStudy(
            model, data, num_texts=num_texts, num_threads=num_threads, cache_dir=cache_dir, on_bytes=on_bytes
        )
    with study, bar(study.num_steps(shares)) as shown:
        shown.say("what texts use")
        usage = study.usage_fields(shown.advance)
        shown.say("right answers")
        answers = study.fidelity_fields(shown.advance)
        rows = []
        for share in shares:
            shown.say(f"{share}% of the experts")
            rows += study.rows(share, lossy_top_k=LOSSY_ROUTING[lossy], on_text=shown.advance)
        record = make_record(
            "sida",
            repeated_command(),
            seed=0,
            threads=study.num_threads,
            **study.model_fields(),
            data=data.resolve().parent.name if data.stem in ("train", "dev", "test") else data.stem,
            lossy=lossy,
            usage=usage,
            answers=answers,
            rows=rows,
        )
    keep(record, out, as_json=as_json)
    if not as_json:
        for table in lazy.sida_tables([record]):
            show(table)
    if plot is not None:
        lazy.plot_sida(record, plot)
        click.echo(f"drew {plot}", err=True)
