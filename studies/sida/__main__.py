"""The value of knowing a text's experts beforehand, for a classifier."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Final

import click

from moeflow.cli.bench.output import result_options
from moeflow.cli.options import cache_dir_option, threads_option
from moeflow.cli.params import NEW_PICTURE
from moeflow.cli.progress import Bar, bar, progress_bar
from moeflow.settings.settings import LOSSY_ROUTING
from studies.harness.command import run_study
from studies.harness.records import publish
from studies.sida.plots import plot_sida
from studies.sida.run import SidaStudy
from studies.sida.tables import sida_tables

EPILOG = """\b
Examples:
  moeflow train classifier --data train.tsv --out reviews
  moeflow train predictor reviews --data train.tsv
  python -m studies.sida reviews --data dev.tsv --plot sida.png

Measures what was published of SiDA (2310.18859): which experts texts leave idle, how often the network of
`moeflow train predictor` names what routers choose, how right the classifier is with routers and with the network in
their place (--lossy-routing), and how fast it is where only a share of its experts is in memory: layer by layer, with
layers read ahead, on demand, and predicted. All ways but the lossy one must give the same bits, or it ends with an
error. Without a predictor, only what needs none is measured. Where texts are long or experts many, fewer texts are
measured, so that it ends in time (--minutes)."""

_USAGE_SHARE: Final = 0.15  # of the time, for what texts use,
_ANSWERS_SHARE: Final = 0.25  # and for right answers; the rest is for speeds


class _Clock:
    """Moves a bar as time goes."""

    def __init__(self, shown: Bar, seconds: float) -> None:
        self._shown, self._until_s, self._told = shown, time.monotonic() + seconds, 0
        self._began_s, self._seconds = time.monotonic(), seconds

    @property
    def left_s(self) -> float:
        """The remaining time."""
        return self._until_s - time.monotonic()

    def tick(self) -> None:
        """Show the time that it is."""
        now = int(min(time.monotonic() - self._began_s, self._seconds))
        self._shown.advance(now - self._told)
        self._told = now


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
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    default=6.0,
    show_default=True,
    help="That measuring takes at most, about; texts are left out for it.",
)
@click.option(
    "--lossy",
    type=click.Choice(tuple(LOSSY_ROUTING)),
    default="sida",
    show_default=True,
    help="Experts that the network chooses for a token where it does: one, or three.",
)
@threads_option
@cache_dir_option
@click.option("--plot", type=NEW_PICTURE, help="Draw it to this PNG.")
@result_options
def sida(
    model: Path,
    data: Path,
    shares: Sequence[int],
    num_texts: int,
    minutes: float,
    lossy: str,
    num_threads: int | None,
    cache_dir: Path,
    plot: Path | None,
    as_json: bool,
    out: Path | None,
) -> None:
    """Measure the gain from knowing a text's experts beforehand.

    MODEL is a classifier's folder, as `moeflow train classifier` makes it.
    """
    with progress_bar("Packing") as on_bytes:
        study = SidaStudy(
            model, data, num_texts=num_texts, num_threads=num_threads, cache_dir=cache_dir, on_bytes=on_bytes
        )
    seconds = 60 * minutes
    with study, bar(ceil(seconds)) as shown:
        clock = _Clock(shown, seconds)
        shown.say("what texts use")
        usage = study.usage_fields(clock.tick, _USAGE_SHARE * seconds)
        shown.say("right answers")
        answers = study.fidelity_fields(clock.tick, _ANSWERS_SHARE * seconds)
        rows = []
        for number, share in enumerate(shares):
            shown.say(f"{share}% of the experts")
            budget_s = max(clock.left_s, 0.0) / (len(shares) - number)
            rows += study.rows(share, lossy_top_k=LOSSY_ROUTING[lossy], on_text=clock.tick, budget_s=budget_s)
        record = publish(
            "sida",
            lambda record: sida_tables([record]),
            out,
            as_json=as_json,
            threads=study.num_threads,
            **study.model_fields(),
            data=data.resolve().parent.name if data.stem in ("train", "dev", "test") else data.stem,
            lossy=lossy,
            usage=usage,
            answers=answers,
            rows=rows,
        )
    if plot is not None:
        plot_sida(record, plot)
        click.echo(f"drew {plot}", err=True)


if __name__ == "__main__":
    run_study(sida)
