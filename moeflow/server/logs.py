"""The destination and form of log lines: stderr, as text or as one JSON object per line.

With JSON, stderr holds nothing else: other lines on it become objects, too (`stderr_lines.py`). Fields of a line, such
as those of a request, are names with values in either form.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import sys
from typing import Any, Literal, TextIO

import msgspec

from moeflow.server.log_ring import log_ring
from moeflow.server.stderr_lines import take_stderr

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


def start_logs(level: LogLevel, form: LogFormat) -> None:
    """Log to stderr until the process ends. With JSON, all that anything writes to stderr becomes objects."""
    configure_logs(level, form, take_stderr(JsonLines(), log_ring().handle) if form == "json" else sys.stderr)


def configure_logs(level: LogLevel, form: LogFormat, stream: TextIO) -> None:
    """Send this process's log to a stream and to its ring; libraries' lines only from "warning" on."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_formatter(form))
    root = logging.getLogger()
    root.handlers[:] = [handler, log_ring()]
    own = logging.getLogger("moeflow")
    own.setLevel(level.upper())
    root.setLevel(max(own.level, logging.WARNING))
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of clients that leave while they are written to


def log_descriptor() -> int | None:
    """Return where this process's log goes, for a child with a log of the same form; None: to stderr."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):
            with contextlib.suppress(OSError, ValueError):  # it is in memory
                return int(handler.stream.fileno())
    return None


def announcement(form: LogFormat, message: str, **fields: str) -> str:
    """Return a line for stdout: the message alone, or with JSON an object as in the log."""
    if form == "text":
        return message
    record = logging.LogRecord("moeflow", logging.INFO, "", 0, message, None, None)
    record.fields = fields
    return JsonLines().format(record)


def _formatter(form: LogFormat) -> logging.Formatter:
    return JsonLines() if form == "json" else TextLines()


class TextLines(logging.Formatter):
    """`TIME LEVEL name: message name=value name=value`, and a traceback below if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        words = [f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}"]
        words += [f"{name}={_value(value)}" for name, value in _fields(record).items()]
        lines = [" ".join(words)]
        if record.exc_info:
            lines.append(self.formatException(record.exc_info))
        return "\n".join(lines)


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the fields, and a traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": record.getMessage()} | _fields(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def _time(record: logging.LogRecord) -> str:
    return datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


def _value(value: Any) -> str:
    """Return a value without line breaks: plain if it has no spaces, else as JSON."""
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str) and value.isprintable() and not {" ", '"', "="} & set(value):
        return value
    return msgspec.json.encode(value).decode()
