"""Main memory of processes: measured, or predicted for processes that have yet to start or to load.

The figures below were measured with Python 3.12 and torch 2 on Linux; tests compare them with runs.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import psutil

from moeflow.core.model_config import ModelConfig
from moeflow.core.units import KIB, MIB

PROCESS_BYTES = 512 * MIB  # a rough sum of these and a pass's work space, where no limit is set
START_BYTES = 24 * MIB  # an engine's threads, libraries that torch loads when it first computes, bookkeeping
TOKEN_BYTES = KIB  # of a tokenizer, for each entry of its vocabulary
ENGINE_BYTES = 240 * MIB  # a fresh engine process: Python, torch and moeflow
CUDA_BYTES = 512 * MIB  # CUDA's context and libraries in an engine process: a usual value, not measured here
HTTP_BYTES = 32 * MIB  # connections, requests and answers of the HTTP process
MARGIN_BYTES = 4 * MIB  # the error of measurements: the system counts pages in batches for each core
TEMPLATE_BYTES = 24 * MIB  # the short-lived process that renders chat templates; it is not measured
SERVED_MARGIN_BYTES = 16 * MIB  # growth of the HTTP process during a pass


def resident_bytes(process_ids: Iterable[int]) -> int:
    """Return the RAM of processes, with shared memory counted for each; ended processes have none."""
    return sum(_resident_bytes(process_id) for process_id in process_ids)


def planned_bytes(held_bytes: int, shape: ModelConfig, *, is_served: bool) -> int:
    """Return the future memory of all processes without weights, keys and values, and a pass's work space.

    `held_bytes` is the present memory of this process, which will run or serve the model.
    """
    loaded_bytes = held_bytes + START_BYTES + shape.vocab_size * TOKEN_BYTES
    return loaded_bytes + (ENGINE_BYTES + HTTP_BYTES if is_served else 0)


def served_bytes(held_bytes: int, shape: ModelConfig) -> int:
    """Return the memory that a server needs once for any number of engines.

    This is the HTTP process, which holds `held_bytes` already, the process for chat templates, and the margin.
    """
    return held_bytes + shape.vocab_size * TOKEN_BYTES + HTTP_BYTES + margin_bytes(is_served=True)


def margin_bytes(*, is_served: bool) -> int:
    """Return the unused part of a memory limit."""
    return TEMPLATE_BYTES + (SERVED_MARGIN_BYTES if is_served else MARGIN_BYTES)


def _resident_bytes(process_id: int) -> int:
    try:
        return int(Path(f"/proc/{process_id}/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return _without_proc(process_id)


def _without_proc(process_id: int) -> int:
    """Return the same on systems without /proc."""
    try:
        return int(psutil.Process(process_id).memory_info().rss)
    except psutil.Error:
        return 0


def own_processes(*, is_served: bool) -> list[int]:
    """Return the processes of an engine that runs here: a served engine's parent is the HTTP process."""
    return [os.getpid(), os.getppid()] if is_served else [os.getpid()]
