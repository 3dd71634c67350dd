"""A check, and the checks of one area, made from functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import msgspec

from moeflow.cli.check.target import Target


class Check(msgspec.Struct, frozen=True):
    """One rule of an API. The docstring of `run` describes it."""

    area: str
    name: str
    run: Callable[[Target], None]
    description: str
    source: str  # section of the API's public reference
    api_path: str  # a server without this path lacks the whole area
    is_optional: bool = False  # a server may refuse the feature
    is_advice: bool = False  # the API promises it only as best effort

    @property
    def full_name(self) -> str:
        """Return the name with its area."""
        return f"{self.area}.{self.name}"


class Area:
    """Makes the checks of an area; each has the name and the first line of its function."""

    def __init__(self, name: str, api_path: str) -> None:
        self._name, self._api_path = name, api_path

    def check(
        self,
        run: Callable[[Target], None],
        source: str,
        *,
        optional: bool = False,
        advice: bool = False,
    ) -> Check:
        """Return a check. See `Check` for `optional` and `advice`."""
        function = getattr(run, "func", run)  # of a partial
        description = (inspect.getdoc(function) or "").partition("\n")[0]
        return Check(
            self._name,
            function.__name__,
            run,
            description,
            source,
            self._api_path,
            is_optional=optional,
            is_advice=advice,
        )
