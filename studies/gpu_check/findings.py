"""A step's results, written as they come."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Findings:
    """The results of a step, rewritten to its file, if any, with each one: a step that is ended leaves those it had."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.result: dict[str, Any] = {}
        self.rows: list[tuple[str, str, str]] = []
        self.faults: list[str] = []

    def note(self, **found: Any) -> None:
        """Add results."""
        self.result |= found
        self._write()

    def row(self, subject: str, value: str, beside: str = "") -> None:
        """Add a row to the table: a figure, and figures to compare it with."""
        self.rows.append((subject, value, beside))
        self._write()

    def fault(self, text: str) -> None:
        """Add a reason for which the step fails."""
        self.faults.append(text)
        self._write()

    @contextmanager
    def of(self, subject: str) -> Iterator[None]:
        """Take an error of the block for a fault, so that others have their turn."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.fault(f"{subject}: {type(error).__name__}: {error}"[:500])

    def _write(self) -> None:
        if self._file is None:
            return
        found = {"result": self.result, "rows": self.rows, "faults": self.faults}
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(found), encoding="utf-8")
        part.replace(self._file)
