"""Runs parts of a step in processes beside each other: compiling kernels takes most of their time."""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Final, TypeVar

from studies.gpu_check import rehearsal
from studies.gpu_check.findings import Findings
from studies.gpu_check.options import is_rehearsal

Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST_PROCESSES: Final = 10


def in_parallel(
    options: argparse.Namespace,
    findings: Findings,
    function: Callable[[argparse.Namespace, Item], Result],
    items: Sequence[Item],
) -> Iterator[tuple[Item, Result]]:
    """Yield items and what a function returns for them, as they come; one that fails is a fault of the step."""
    num_processes = 1 if is_rehearsal(options) else min(_MOST_PROCESSES, os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, _prepare, (options,)) as pool:
        futures = {pool.submit(function, options, item): item for item in items}
        for future in as_completed(futures):
            item = futures[future]
            with findings.of(str(item)):
                yield item, future.result()


def _prepare(options: argparse.Namespace) -> None:
    """Change a process before it imports moeflow."""
    if is_rehearsal(options):
        rehearsal.prepare(options.group, options.step)
