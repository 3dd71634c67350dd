"""Which known name an unknown one was meant to be: one with the same meaning, or a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

LIKENESS: Final = 0.6  # of two spellings, by difflib's ratio: "serf" is "serve"
_MAX_CHARACTERS: Final = 80  # of a name, which may be a whole document


def near_name(
    name: str, known: Iterable[str], alike: Iterable[tuple[str, ...]] = (), likeness: float = LIKENESS
) -> str | None:
    """Return the known name that was probably meant; None if none is near.

    `alike` are groups of names that mean the same, in this program or others, the likeliest first. Spellings of
    less `likeness` are not near.
    """
    names = list(known)
    same = next((group for group in alike if name in group), ())
    meant = next((other for other in same if other in names), None)
    near = difflib.get_close_matches(name[:_MAX_CHARACTERS], names, n=1, cutoff=likeness)
    return meant or next(iter(near), None)


def did_you_mean(
    name: str,
    known: Iterable[str],
    otherwise: str,
    alike: Iterable[tuple[str, ...]] = (),
    likeness: float = LIKENESS,
) -> str:
    """Return the hint of an error: the name that was probably meant, or `otherwise`."""
    near = near_name(name, known, alike, likeness)
    return otherwise if near is None else f"did you mean {near!r}?"
