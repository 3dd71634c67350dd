"""What processes hold of main memory: measured, and beforehand for those that have yet to start or to load.

The figures below were measured with Python 3.12 and torch 2 on Linux; tests hold them against runs.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import psutil

from moeflow.core.model_config import ModelConfig
from moeflow.core.units import KIB, MIB

PROCESS_BYTES = 512 * MIB  # all this and the work space of a pass, where no limit makes it matter how much
START_BYTES = 24 * MIB  # an engine's threads, libraries that torch loads when it first computes, bookkeeping
TOKEN_BYTES = KIB  # of a tokenizer, for each entry of its vocabulary
ENGINE_BYTES = 240 * MIB  # a fresh engine process: Python, torch and moeflow
HTTP_BYTES = 32 * MIB  # connections, requests and answers of the process that speaks HTTP
MARGIN_BYTES = 4 * MIB  # what measuring may miss: the system counts pages in batches for each core
TEMPLATE_BYTES = 24 * MIB  # the process that renders chat templates, which is not measured: it comes and goes
SERVED_MARGIN_BYTES = 16 * MIB  # what the process that speaks HTTP may take during a pass


def resident_bytes(process_ids: Iterable[int]) -> int:
    """Return what processes hold in RAM together, memory that they share counted for each; those gone hold none."""
    return sum(_resident_bytes(process_id) for process_id in process_ids)


def planned_bytes(held_bytes: int, shape: ModelConfig, *, is_served: bool) -> int:
    """Return what all processes will hold beside weights, keys and values, and a pass's work space.

    `held_bytes` is what this process, in which the model will run or which will serve it, holds already.
    """
    loaded_bytes = held_bytes + START_BYTES + shape.vocab_size * TOKEN_BYTES
    return loaded_bytes + (ENGINE_BYTES + HTTP_BYTES if is_served else 0)


def served_bytes(held_bytes: int, shape: ModelConfig) -> int:
    """Return what is there once, however many engines a server has: the process that speaks HTTP, which holds
    `held_bytes` already, the one that renders chat templates, and the margin.
    """
    return held_bytes + shape.vocab_size * TOKEN_BYTES + HTTP_BYTES + margin_bytes(is_served=True)


def margin_bytes(*, is_served: bool) -> int:
    """Return how much of a memory limit is left free."""
    return TEMPLATE_BYTES + (SERVED_MARGIN_BYTES if is_served else MARGIN_BYTES)


def _resident_bytes(process_id: int) -> int:
    try:
        return int(Path(f"/proc/{process_id}/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return _without_proc(process_id)


def _without_proc(process_id: int) -> int:
    """Ask in the way that works on other systems, too."""
    try:
        return int(psutil.Process(process_id).memory_info().rss)
    except psutil.Error:
        return 0


def own_processes(*, is_served: bool) -> list[int]:
    """Return the processes of an engine that runs here: if it is served, its parent speaks HTTP."""
    return [os.getpid(), os.getppid()] if is_served else [os.getpid()]
