"""Options of verbs that send traffic or simulate it: how often requests come, how long they are, who joins a pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import click

from moeflow.scheduler.policy import POLICIES

rates_option: Final = click.option(
    "--rate", "rates", type=float, multiple=True, default=(1.0, 2.0, 4.0, 8.0), help="Requests/s; may be given often."
)

policies_option: Final = click.option(
    "--policy",
    "policies",
    type=click.Choice(list(POLICIES)),
    multiple=True,
    default=tuple(POLICIES),
    help="How batches are made; may be given twice.",
)


def workload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that shape the traffic; the command gets them as `traffic`."""
    options = [
        click.option("-n", "--num-requests", type=click.IntRange(1, 1_000_000), default=128, help="Requests of a run."),
        click.option("--min-prompt", type=click.IntRange(1), default=8, help="Shortest prompt, in tokens."),
        click.option("--max-prompt", type=click.IntRange(1), default=128, help="Longest prompt."),
        click.option("--min-new", type=click.IntRange(1), default=1, help="Shortest answer, in tokens."),
        click.option("--max-new", type=click.IntRange(1), default=128, help="Longest answer."),
        click.option("--seed", type=int, default=0, help="The same seed makes the same traffic."),
    ]
    names = ("num_requests", "min_prompt", "max_prompt", "min_new", "max_new", "seed")

    @functools.wraps(command)
    def gathered(**kwargs: Any) -> Any:
        return command(traffic={name: kwargs.pop(name) for name in names}, **kwargs)

    return functools.reduce(lambda inner, option: option(inner), reversed(options), gathered)
