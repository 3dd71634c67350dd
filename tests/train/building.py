"""Builds the built-in model in a process of its own, which imports no more than that takes."""

from __future__ import annotations

from multiprocessing import Queue
from pathlib import Path

from moeflow.train import builtin


def build(source: Path, cache_dir: Path, queue: Queue) -> None:
    """Make the model of another source; put its folder into the queue, and whether it was built here."""
    builtin.builtin_source = lambda: source
    builds = []
    folder = builtin.ensure_builtin_model(cache_dir, lambda *progress: builds.append(progress))
    queue.put((folder, bool(builds)))
