"""Keeps the newest lines of the server's log, for the page. Their text is bounded, and so is the memory of all.

Lines have the same fields as in the log, so prompts are only in them where the log has them, too.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

MAX_LINES: Final = 1000
_MAX_MESSAGE: Final = 2000  # characters
_MAX_VALUE: Final = 500  # of a field
_MAX_FIELDS: Final = 40
_MAX_EXCEPTION: Final = 4000  # the last ones: these name the error
_CUT: Final = "…"
_traceback = logging.Formatter()


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of the log."""

    number: int  # a later line has a higher one, also after a restart of the server
    time_s: float  # since the epoch
    level: str  # debug, info, warning, error or critical
    logger: str
    message: str
    fields: dict[str, Any] = field(default_factory=dict)  # values are numbers, booleans or text
    exception: str = ""  # a traceback


class LogRing(logging.Handler):
    """The newest lines. All methods may be called from any thread."""

    def __init__(self, max_lines: int = MAX_LINES) -> None:
        super().__init__()
        self._guard = threading.Lock()
        self._lines: deque[LogLine] = deque(maxlen=max_lines)
        self._number = int(time.time() * 1000)  # no earlier server has logged a line each millisecond

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        try:
            self.take([_line_of(record)])
        except Exception:  # a message that does not fit its arguments, for example: the log's own handler reports it
            return

    def take(self, lines: Iterable[LogLine]) -> None:
        """Keep lines of another process."""
        with self._guard:
            for line in lines:
                self._append(line)

    def since(self, number: int) -> list[LogLine]:
        """Return the lines that are kept with a higher number, oldest first."""
        with self._guard:
            return [line for line in self._lines if line.number > number]

    def has_all_since(self, number: int) -> bool:
        """Return whether no line with a higher number has been dropped. A line of an earlier server is not kept."""
        with self._guard:
            return bool(self._lines) and self._lines[0].number <= number + 1

    def _append(self, line: LogLine) -> None:
        self._number += 1
        self._lines.append(replace(line, number=self._number))


@functools.cache
def log_ring() -> LogRing:
    """Return this process's ring, which `logs.configure_logs` fills."""
    return LogRing()


def _line_of(record: logging.LogRecord) -> LogLine:
    given: dict[str, Any] = getattr(record, "fields", {})
    exception = _traceback.formatException(record.exc_info) if record.exc_info else ""
    return LogLine(
        number=0,
        time_s=record.created,
        level=record.levelname.lower(),
        logger=record.name,
        message=_cut(record.getMessage(), _MAX_MESSAGE),
        fields={name: _plain(value) for name, value in list(given.items())[:_MAX_FIELDS]},
        exception=_CUT * (len(exception) > _MAX_EXCEPTION) + _encodable(exception[-_MAX_EXCEPTION:]),
    )


def _plain(value: Any) -> Any:
    """Return a number or a boolean as it is, and anything else as text of a bounded length."""
    if isinstance(value, bool | int | float):
        return value
    return _cut(value if isinstance(value, str) else msgspec.json.encode(value).decode(), _MAX_VALUE)


def _cut(text: str, max_characters: int) -> str:
    return _encodable(text if len(text) <= max_characters else text[:max_characters] + _CUT)


def _encodable(text: str) -> str:
    """Return a text with escapes for lone surrogates, such as those of file names that are not UTF-8."""
    return text.encode(errors="backslashreplace").decode()
