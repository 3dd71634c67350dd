"""What the verbs under `moeflow train` share: how a model is run to learn from it, and how results are shown."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from moeflow.cli import lazy

_MOST_SEQUENCES = 48  # that the model computes at once


def teacher_settings(model: Path, cache_dir: Path, memory: str | None) -> lazy.Settings:
    """Return how a model is run that is learnt from: in int8 where kernels compute that, within `memory` if set."""
    values = lazy.read_settings(
        lazy.Settings,
        {"model": str(model), "max_num_seqs": _MOST_SEQUENCES, "cache_dir": cache_dir}
        | ({"quantize": "int8"} if lazy.cpu.is_available() else {})
        | ({"memory_bytes": memory} if memory else {}),
    )
    return lazy.Settings(**values)


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print a name and what is to be said of it a line."""
    console = Console(soft_wrap=True, highlight=False)
    for name, value in facts:
        console.print(f"[bold]{name:<16}[/]{escape(value)}")
