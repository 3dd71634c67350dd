"""Which of a test's parameters `make test` takes; the others are for thorough runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def thorough_unless(is_taken: Callable[..., bool], values: Iterable[Any]) -> list[Any]:
    """Return parameters for `parametrize`: those for which `is_taken(*value)` is false are marked `thorough`.

    A value that is no tuple is its function's only argument.
    """

    def parameter(value: Any) -> Any:
        each = value if isinstance(value, tuple) else (value,)
        return pytest.param(*each, marks=() if is_taken(*each) else pytest.mark.thorough)

    return [parameter(value) for value in values]
