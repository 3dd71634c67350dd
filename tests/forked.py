"""Processes with slow imports already done: forked from one that imported them, once in each test process."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

FAMILIES = ("llama", "mixtral", "olmoe", "qwen3_moe")
# Also the modules whose functions run in such processes: a child imports its function's module, and with it torch.
PRELOADED = [
    "tests.checkpoint.hostile",
    "tests.parallel.ranks",
    "moeflow.planner.resolve",
    "moeflow.text.tokenizer",
    *(f"moeflow.models.{name}" for name in FAMILIES),
]


def forked_context() -> ForkServerContext:
    """Return what starts them. All share one server, which imports the modules named before its first process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
