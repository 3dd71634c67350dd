"""Who is measured: llama.cpp on a mapped file, and our engine with predictors and policies to compare."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.contestants import Contestant
from benchmarks.peers.environments import LLAMA

WEIGHTS = "bfloat16"
FOLDER, SLABS, GGUF = "big", "big-bfloat16.slabs", "big-bf16.gguf"
OURS, UNPREDICTED, PEER, RESIDENT = "moeflow", "moeflow, no prediction", "llama.cpp, mapped", "moeflow, resident"


def ours(name: str, folder: Path, **settings: Any) -> Contestant:
    """Return our engine with these settings."""
    wish = {"model": str(folder / FOLDER), "weights": WEIGHTS, "settings": {"dtype": WEIGHTS, **settings}}
    return Contestant(name, Path(sys.executable), "moeflow_engine", wish, "greedy")


def within(budget_bytes: int, folder: Path, policies: Sequence[str]) -> list[Contestant]:
    """Return everyone who runs within a budget; a policy is measured beside the default one."""
    limited = {"memory_bytes": budget_bytes, "packed_weights_file": str((folder / SLABS).absolute())}
    found = [
        ours(OURS, folder, **limited),
        ours(UNPREDICTED, folder, **limited, predictor="none"),
        *(ours(f"moeflow, {policy}", folder, **limited, expert_policy=policy) for policy in policies),
    ]
    if LLAMA.python(folder).exists():
        wish = {"model": str(folder / GGUF)}
        found.insert(0, Contestant(PEER, LLAMA.python(folder), "llama", wish, "none: fed with tokens"))
    return found
