"""Writes tasks for `moeflow train classifier`, with inputs of middle and of great length.

    python -m studies.text_tasks FOLDER

Each task is a folder with train.tsv, dev.tsv and test.tsv. Texts are prose of docstrings of installed packages, and
labels are computed. Names of the packages are left out of the texts. No module is in two of the files, so that no text
is known from a neighbour.

- `middle` and `long`: texts of 40 to 70 and of 170 to 280 words. The label is the package.
- `pairs`, like MRPC: two sentences. `same`: the second one says the first one in another order, with fewer words.
  `other`: it is so made from another sentence nearby, the one with most words in common.
- `statements`, like MultiRC: a statement and a passage of 170 to 280 words. `yes`: the passage says it. `no`: another
  passage of the module does.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

PACKAGES = ("numpy", "scipy", "torch", "transformers")
PARTS = {"train": 80, "dev": 10, "test": 10}  # modules of a hundred
MAX_TEXTS = {"train": 1500, "dev": 150, "test": 200}  # of a label
SENTENCE_WORDS = range(10, 31)
LEFT_OUT = 0.15  # of a repeated sentence's words
NEIGHBOURS = 20  # sentences before and after one; the most similar is chosen
BETWEEN = " | "
_NAMES = re.compile(r"\b(np|numpy|scipy|sp|torch|pytorch|transformers|huggingface)\b", re.IGNORECASE)

Texts = Iterator[tuple[str, str]]  # labels and texts of a module
Make = Callable[[str, Sequence[str], random.Random], Texts]  # from the package, the module's words, and chance


def main(folder: Path) -> None:
    """Write all tasks."""
    words = {package: [(part_of(module), list(prose(module))) for module in modules(package)] for package in PACKAGES}
    for task, make in TASKS.items():
        chance = random.Random(0)
        found: dict[str, dict[str, list[str]]] = {part: {} for part in PARTS}
        for package, of_modules in words.items():
            for part, of_module in of_modules:
                for label, text in make(package, of_module, chance):
                    found[part].setdefault(label, []).append(text)
        for part, by_label in found.items():
            write(folder / task / f"{part}.tsv", by_label, MAX_TEXTS[part])


def by_package(shortest: int, longest: int) -> Make:
    """Return how to make texts of so many words whose label is the package."""
    return lambda package, words, _: ((package, text) for text in pieces(iter(words), shortest, longest))


def pairs(_: str, words: Sequence[str], chance: random.Random) -> Texts:
    """Yield pairs of sentences: each sentence once with itself, and once with the most similar neighbour."""
    found = list(sentences(words))
    sets = [{*sentence} for sentence in found]
    for place, sentence in enumerate(found):
        near = range(max(place - NEIGHBOURS, 0), min(place + NEIGHBOURS + 1, len(found)))
        others = [other for other in near if found[other] != sentence]
        if others:
            nearest = max(others, key=lambda other: len(sets[place] & sets[other]) / len(sets[place] | sets[other]))
            yield "same", joined(sentence, said_again(sentence, chance))
            yield "other", joined(sentence, said_again(found[nearest], chance))


def statements(_: str, words: Sequence[str], chance: random.Random) -> Texts:
    """Yield statements and passages: each passage with a sentence of its own, and with one of the next passage."""
    passages = [text.split() for text in pieces(iter(words), 170, 280)]
    for passage, other in pairwise(passages):
        own, foreign = list(sentences(passage)), list(sentences(other))
        if own and foreign:
            yield "yes", joined(said_again(chance.choice(own), chance), passage)
            yield "no", joined(said_again(chance.choice(foreign), chance), passage)


def sentences(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield the sentences of usual length."""
    sentence: list[str] = []
    for word in words:
        sentence.append(word)
        if word.endswith((".", ":")):
            if len(sentence) in SENTENCE_WORDS:
                yield sentence
            sentence = []


def said_again(sentence: Sequence[str], chance: random.Random) -> list[str]:
    """Return a sentence with its end first, and some words left out."""
    middle = chance.randrange(len(sentence) // 3, 2 * len(sentence) // 3)
    return [word for word in (*sentence[middle:], *sentence[:middle]) if chance.random() >= LEFT_OUT]


def joined(first: Sequence[str], second: Sequence[str]) -> str:
    """Return two texts as one."""
    return f"{' '.join(first)}{BETWEEN}{' '.join(second)}"


TASKS: dict[str, Make] = {
    "middle": by_package(40, 70),
    "long": by_package(170, 280),
    "pairs": pairs,
    "statements": statements,
}


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


def write(file: Path, by_label: dict[str, list[str]], max_texts: int) -> None:
    """Write texts of all labels, as many of each, in an order that is always the same; each text once."""
    once = {label: list(dict.fromkeys(texts)) for label, texts in by_label.items()}
    each = min([max_texts, *map(len, once.values())])
    chance = random.Random(0)
    lines = [f"{text}\t{label}\n" for label, texts in sorted(once.items()) for text in chance.sample(texts, each)]
    chance.shuffle(lines)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(lines), encoding="utf-8")
    print(f"{file}: {len(lines)} texts")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
