"""Writes two tasks for `moeflow train classifier`, with inputs of middle and of great length.

    python -m studies.text_tasks FOLDER

Each text is prose of docstrings of one installed package, and its label is the package: FOLDER/middle has texts of 40
to 70 words, FOLDER/long of 170 to 280, each with train.tsv, dev.tsv and test.tsv. Names of the packages are left out of
the texts. No module is in two of the files, so that no text is known from a neighbour.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("numpy", "scipy", "torch", "transformers")
TASKS = {"middle": (40, 70), "long": (170, 280)}  # words of a text
PARTS = {"train": 80, "dev": 10, "test": 10}  # modules of a hundred
MAX_TEXTS = {"train": 1500, "dev": 150, "test": 200}  # of a package
_NAMES = re.compile(r"\b(np|numpy|scipy|sp|torch|pytorch|transformers|huggingface)\b", re.IGNORECASE)


def main(folder: Path) -> None:
    """Write all tasks."""
    for task, (shortest, longest) in TASKS.items():
        found: dict[str, dict[str, list[str]]] = {part: {} for part in PARTS}
        for package in PACKAGES:
            for module in modules(package):
                texts = found[part_of(module)].setdefault(package, [])
                texts += pieces(prose(module), shortest, longest)
        for part, by_package in found.items():
            write(folder / task / f"{part}.tsv", by_package, MAX_TEXTS[part])


def modules(package: str) -> list[Path]:
    """Return the source files of a package, those of tests left out."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    return sorted(file for file in Path(spec.origin).parent.rglob("*.py") if "tests" not in file.parts)


def part_of(module: Path) -> str:
    """Return which file a module's texts go to, by a hash of its name."""
    place = hashlib.sha256("/".join(module.parts[-3:]).encode()).digest()[0] * 100 // 256
    if place < PARTS["train"]:
        return "train"
    return "dev" if place < PARTS["train"] + PARTS["dev"] else "test"


def prose(module: Path) -> Iterator[str]:
    """Yield the words of a module's docstrings that are sentences, one docstring after another."""
    try:
        tree = ast.parse(module.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
            lines = [line.strip() for line in text.splitlines()]
            yield from _NAMES.sub(" ", " ".join(line for line in lines if not line.startswith((">>>", "...")))).split()


def pieces(words: Iterator[str], shortest: int, longest: int) -> Iterator[str]:
    """Yield the words in texts, whose lengths depend on the first word alone."""
    kept: list[str] = []
    for word in words:
        kept.append(word)
        length = shortest + hashlib.sha256(kept[0].encode()).digest()[0] * (longest - shortest + 1) // 256
        if len(kept) >= length:
            yield " ".join(kept)
            kept = []


def write(file: Path, by_package: dict[str, list[str]], max_texts: int) -> None:
    """Write texts of all packages, as many of each, in an order that is always the same; each text once."""
    once = {package: list(dict.fromkeys(texts)) for package, texts in by_package.items()}
    each = min(max_texts, *map(len, once.values()))
    chance = random.Random(0)
    lines = [f"{text}\t{package}\n" for package, texts in sorted(once.items()) for text in chance.sample(texts, each)]
    chance.shuffle(lines)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(lines), encoding="utf-8")
    print(f"{file}: {len(lines)} texts")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
