"""The JSON file of a run, rewritten after each step, and the table at its end."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from moeflow.bench.records import commit, machine, versions
from moeflow.core.units import GIB
from studies.gpu_check import STAND_INS


class Report:
    """The file, rewritten after each step."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._began_s = time.monotonic()
        self._steps: list[dict[str, Any]] = []
        self._about = {
            "kind": "gpu_check",
            "group": options.group,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": " ".join(sys.argv),
            "commit": commit(),
            "machine": machine(),
            "versions": versions(),
            "gpu": _gpu(),
            "device": options.device or "cuda",
            "stand_ins": STAND_INS,
        }

    @property
    def left_s(self) -> float:
        """The remaining time."""
        return float(self._options.time_limit - (time.monotonic() - self._began_s))

    @property
    def is_good(self) -> bool:
        """Whether all steps succeeded."""
        return all("error" not in step for step in self._steps)

    def add(self, name: str, outcome: dict[str, Any]) -> None:
        """Take down how a step ended, and write."""
        self._steps.append({"step": name, **outcome})
        print(f"{name}: {outcome.get('error', 'done')} ({outcome['seconds']} s)", flush=True)
        text = json.dumps({**self._about, "steps": self._steps}, indent=1)
        self._options.out.write_text(text + "\n", encoding="utf-8")

    def table(self) -> str:
        """Return the figures of all steps as aligned text."""
        return aligned([[step["step"], *row] for step in self._steps for row in step.get("rows", ())])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _gpu() -> dict[str, Any] | None:
    """Describe the GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / GIB, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }
