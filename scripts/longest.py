"""Prints the longest files, classes and functions of the package: a sign where to look, not a limit.

Knows lengths only; whether a long thing is a bad thing is for its reader to say.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SHOWN = 3
PACKAGE = Path(__file__).parent.parent / "moeflow"


def measure(file: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (kind, lines, where) for the file and every class and function in it."""
    text = file.read_text(encoding="utf-8")
    name = str(file.relative_to(PACKAGE.parent))
    yield "file", text.count("\n"), name
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            kind = "class"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            kind = "function"
        else:
            continue
        yield kind, (node.end_lineno or node.lineno) - node.lineno + 1, f"{name}:{node.lineno} {node.name}"


def main() -> None:
    """Print the three longest of each kind."""
    found = [row for file in sorted(PACKAGE.rglob("*.py")) for row in measure(file)]
    for kind in ("file", "class", "function"):
        longest = sorted((row for row in found if row[0] == kind), key=lambda row: -row[1])[:SHOWN]
        print(f"longest {kind}: " + ", ".join(f"{where} ({lines})" for _, lines, where in longest))


if __name__ == "__main__":
    main()
