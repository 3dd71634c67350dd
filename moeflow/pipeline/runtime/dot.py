"""Draws a stream of tasks as a GraphViz graph, in a colour for each lane. Source: ExpertFlow 3.6 (Legion Spy)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from moeflow.pipeline.task import Task

_COLOURS = ("#a6cee3", "#b2df8a", "#fdbf6f", "#fb9a99", "#cab2d6", "#ffff99", "#d9d9d9", "#8dd3c7")


def write_dot(tasks: Iterable[Task], path: Path) -> None:
    """Write the graph; `dot -Tsvg` makes a picture of it. Raises: OSError."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in dot_lines(tasks))


def dot_lines(tasks: Iterable[Task]) -> Iterator[str]:
    """Yield the graph's lines as the stream comes, so that a long one takes no memory; last, the lanes' colours."""
    colours: dict[str, str] = {}
    yield "digraph tasks {"
    yield '  node [shape=box, style="rounded,filled", fontname="sans-serif"];'
    for task in tasks:
        colour = colours.setdefault(task.lane, _COLOURS[len(colours) % len(_COLOURS)])
        yield f'  t{task.id} [label="{_text(_title(task))}", fillcolor="{colour}"];'
        yield from (f"  t{before} -> t{task.id};" for before in task.after)
    yield '  subgraph cluster_lanes { label="lanes";'
    for number, (lane, colour) in enumerate(colours.items()):
        yield f'    lane{number} [label="{_text(lane)}", fillcolor="{colour}"];'
    yield "  }"
    yield "}"


def _title(task: Task) -> str:
    places = [] if task.layer is None else [f"layer {task.layer}"]
    places += [] if task.micro_batch is None else [f"micro-batch {task.micro_batch}"]
    return "\n".join([task.op, *places])


def _text(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
