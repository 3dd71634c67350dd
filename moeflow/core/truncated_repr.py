"""Values from files as error messages show them: of a long one its beginning, whatever it is."""

from __future__ import annotations

import reprlib
from typing import Any, Final

_LONGEST: Final = 120
_REPR: Final = reprlib.Repr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxtuple, _REPR.maxdict = 3, 8, 8, 4
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60


def truncated_repr(value: Any) -> str:
    """Return `repr` of a value, short."""
    return truncated(_REPR.repr(value))


def truncated(text: str, *, longest: int = _LONGEST) -> str:
    """Return a text, of a long one both ends."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}...{text[-half:]}"
