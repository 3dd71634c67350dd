"""Claim: launching a task or a read costs a few microseconds, and tracing it about one more.

Runs tasks that do nothing, so that all of the time is the machinery's: the stream alone, tasks in the calling thread,
the same traced, tasks that feed each other from lane to lane, and bare submissions to a lane whose threads are busy.
The table has the median round and half the spread of the middle half.

    python -m studies.runtime_overhead
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import click

from moeflow.bench.tables import Table
from moeflow.cli.bench.output import show
from moeflow.pipeline.priority import PREFETCH
from moeflow.pipeline.runtime.executor import Executor
from moeflow.pipeline.runtime.future import Future
from moeflow.pipeline.runtime.lane import Lane
from moeflow.pipeline.runtime.trace import Trace
from moeflow.pipeline.sequential import sequential
from moeflow.pipeline.task import COMPUTE, Task, TaskMaker, checked
from studies.harness.command import run_study
from studies.harness.interleaved import measure_interleaved, microseconds_text, seconds

LAYERS = 48
SUBMISSIONS = 1000
DISK_THREADS = 8
OPS = dict.fromkeys(("load_weights", "pre_attention", "attention", "post_attention", "do"), lambda _: None)


def loads_beside_computing() -> Iterator[Task]:
    """Yield a load on the link for each computation, all loads free to begin."""
    make, last = TaskMaker(), None
    for layer in range(LAYERS):
        load = make("do", layer, lane="link")
        yield load
        last = make("do", layer, after=[load, last])
        yield last


def to_and_fro() -> Iterator[Task]:
    """Yield tasks; each waits for the one before it, in the other lane."""
    make, last = TaskMaker(), None
    for number in range(2 * LAYERS):
        last = make("do", lane=("link", COMPUTE)[number % 2], after=[last])
        yield last


def submit_while_busy(disk: Lane) -> float:
    """Time submissions to a disk whose threads are all at work; they are cancelled before it is free again."""
    is_over = threading.Event()
    for _ in range(DISK_THREADS):
        disk.submit(is_over.wait)
    futures: list[Future[int]] = []
    time_s = seconds(lambda: futures.extend(disk.submit(int, priority=PREFETCH) for _ in range(SUBMISSIONS)))
    for future in futures:
        future.cancel()
    is_over.set()
    return time_s


@click.command(help=__doc__)
@click.option("--rounds", default=50, show_default=True)
def main(rounds: int) -> None:
    """Measure and print."""
    here, traced = Executor(OPS, {}), Executor(OPS, {}, trace=Trace())
    with Lane("link") as link, Lane("disk", DISK_THREADS) as disk:
        both = Executor(OPS, {"link": link})
        cases: dict[str, tuple[Callable[[], float], int]] = {
            "the stream alone": (lambda: seconds(lambda: list(checked(sequential(LAYERS, 1)))), 4 * LAYERS),
            "in the calling thread": (lambda: seconds(lambda: here.run(sequential(LAYERS, 1))), 4 * LAYERS),
            "the same, traced": (lambda: seconds(lambda: traced.run(sequential(LAYERS, 1))), 4 * LAYERS),
            "loads beside computing": (lambda: seconds(lambda: both.run(loads_beside_computing())), 2 * LAYERS),
            "to and fro between two threads": (lambda: seconds(lambda: both.run(to_and_fro())), 2 * LAYERS),
            "submitted to a busy disk": (lambda: submit_while_busy(disk), SUBMISSIONS),
        }
        times = measure_interleaved({name: run for name, (run, _) in cases.items()}, rounds)
    rows = tuple((name, microseconds_text(found, cases[name][1])) for name, found in times.items())
    show(Table("Tasks that do nothing", ("", "microseconds a task"), rows))


if __name__ == "__main__":
    run_study(main)
