"""Makes the built-in model in its own process, so that the plan does not count the memory of making it.

The process reports progress, or its error, in lines of JSON.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from moeflow.core import errors
from moeflow.core.apart import run_apart
from moeflow.core.errors import CapacityError, MoeflowError
from moeflow.train.builtin import builtin_folder, ensure_builtin_model
from moeflow.train.phases import OnDone


class _Report(msgspec.Struct, frozen=True):
    done: int = 0
    total: int = 0
    kind: str = ""  # class of the error
    error: str = ""


def make_builtin_apart(cache_dir: Path, on_progress: OnDone | None = None) -> Path:
    """Return the built-in model's folder. If it is missing, another process makes it.

    Raises: as `ensure_builtin_model`; CapacityError if the process ends early.
    """
    folder = builtin_folder(cache_dir)
    if folder.is_dir():
        return ensure_builtin_model(cache_dir)
    with suppress(ChildProcessError):  # then there is no folder
        for line in run_apart(__name__, str(cache_dir.absolute()).encode()):
            report = msgspec.json.decode(line, type=_Report)
            if report.kind:
                kind = getattr(errors, report.kind)
                raise kind(report.error) if kind in (errors.ConfigError, CapacityError) else MoeflowError(report.error)
            if on_progress is not None:
                on_progress(report.done, report.total)
    if not folder.is_dir():
        raise CapacityError("the process for the built-in model ended early: free memory, then try again")
    return folder


def main() -> None:
    """Make the model. stdin names the cache folder."""
    cache_dir = Path(sys.stdin.read())
    try:
        ensure_builtin_model(cache_dir, lambda done, total: _say(_Report(done=done, total=total)))
    except MoeflowError as error:
        _say(_Report(kind=type(error).__name__, error=str(error)))


def _say(report: _Report) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
