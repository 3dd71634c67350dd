"""Turns each plain line that reaches stderr into one log line: from this process, its children and native code.

The file descriptor of stderr becomes a pipe, which a thread reads. Log lines of this process go past the pipe.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from typing import IO, TextIO

_LINE = re.compile(
    r"(?:[\d-]+ [\d:,]+ (?:rank \d+ )?(?P<level>[A-Z]+) (?P<logger>[\w.]+): |(?P<word>error|warning|note): )?"
    r"(?P<message>.*)"
)
Note = Callable[[logging.LogRecord], object]
_DRAIN_S = 2.0  # at the end of the process


def take_stderr(formatter: logging.Formatter, note: Note) -> TextIO:
    """Format all plain lines on stderr from now on; return the stream where formatted lines go.

    `note` gets the record of each, in a thread.
    """
    stderr_fd = sys.__stderr__.fileno() if sys.__stderr__ is not None else 2
    stream = os.fdopen(os.dup(stderr_fd), "w", encoding="utf-8", errors="backslashreplace")
    read_fd, write_fd = os.pipe()
    os.dup2(write_fd, stderr_fd)
    os.close(write_fd)
    reader = threading.Thread(
        target=_copy, args=(os.fdopen(read_fd, encoding="utf-8", errors="backslashreplace"), stream, formatter, note)
    )
    reader.daemon = True
    reader.start()

    def give_back() -> None:
        sys.stderr.flush()
        os.dup2(stream.fileno(), stderr_fd)
        reader.join(_DRAIN_S)  # a child may outlive the server and keep the pipe open

    atexit.register(give_back)
    return stream


def record_of_line(line: str) -> logging.LogRecord:
    """Return the log record for one plain line; a prefix such as `warning: ` becomes its level."""
    match = _LINE.fullmatch(line)
    assert match is not None, "the expression matches any line"
    name = match["level"] or (match["word"] or "").upper()
    level = logging.getLevelNamesMapping().get(name, logging.INFO)
    return logging.LogRecord(match["logger"] or "moeflow", level, "", 0, match["message"], None, None)


def _copy(lines: IO[str], stream: TextIO, formatter: logging.Formatter, note: Note) -> None:
    with lines:
        for line in lines:
            if line := line.rstrip():
                record = record_of_line(line)
                stream.write(formatter.format(record) + "\n")
                stream.flush()
                note(record)
