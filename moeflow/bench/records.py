"""Results as JSON lines: each has the measurement, the machine, the versions, and the command to repeat it.

A record is one JSON object:

    {"kind": "engine", "time": "2026-01-31T12:00:00+00:00", "command": "moeflow bench engine ...", "seed": 0,
     "commit": "1a2b3c4", "is_dirty": false, "machine": {...}, "versions": {...}, ...what was measured}

`kind` names the tool that wrote it, as the sections of `studies/report` do. A dirty record was measured
with code that no commit has: the page marks it, and it is to be measured again.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

from moeflow.core.errors import ConfigError
from moeflow.core.untrusted import UnreadableError, parse_json

Record = dict[str, Any]
ROOT = Path(__file__).parents[2]
CODE = ("moeflow", "csrc", "studies", "CMakeLists.txt", "pyproject.toml", "constraints.txt")
PACKAGES = ("moeflow", "torch", "numpy", "transformers")
_ALWAYS = ("kind", "time", "command", "commit", "machine", "versions")
_MACHINE = ("cpu", "cores", "memory_gib", "threads")


def make_record(kind: str, command: Sequence[str], *, seed: int, threads: int | None, **measured: Any) -> Record:
    """Return a record of the latest measurement on this machine. `threads` is what computed; None: unknown."""
    return {
        "kind": kind,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "seed": seed,
        "commit": commit(),
        "is_dirty": is_tree_dirty(),
        "machine": {**machine(), "threads": threads},
        "versions": versions(),
        **measured,
    }


def machine() -> dict[str, Any]:
    """Describe the hardware and the system."""
    return {
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Return the commit of the source tree; None without a repository."""
    return _git("describe", "--always", "--exclude=*") or None


def is_tree_dirty() -> bool:
    """Return whether the measured code differs from the commit; documents and records do not count."""
    return bool(_git("status", "--porcelain", "--", *CODE))


def is_dirty(record: Record) -> bool:
    """Return whether a record was measured with code that no commit has; older ones end their commit with a + then."""
    return bool(record.get("is_dirty", (record["commit"] or "").endswith("+")))


def _git(*arguments: str) -> str:
    """Return what git reports about the source tree; nothing if it cannot."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def append(file: Path, record: Record) -> None:
    """Add a record to a file, in one write, so that a run that is stopped leaves whole lines. Raises: OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")


def read(files: Iterable[Path]) -> list[Record]:
    """Return the records of all files, in order. Raises: ConfigError, naming file and line, if one is no record."""
    records = []
    for file in files:
        for number, line in enumerate(file.read_bytes().splitlines(), 1):
            if not line.strip():
                continue
            try:
                record = parse_json(line)
            except UnreadableError as error:
                raise ConfigError(f"{file}, line {number}: no JSON: {error}; delete the line") from error
            if missing := _missing(record):
                raise ConfigError(f"{file}, line {number}: no record, it has no {', '.join(missing)}; delete the line")
            records.append(record)
    return records


def _missing(record: Any) -> list[str]:
    """Return the fields of every record that this one lacks."""
    if not isinstance(record, dict):
        return list(_ALWAYS)
    machine = record.get("machine")
    parts = [f"machine.{name}" for name in _MACHINE if not isinstance(machine, dict) or name not in machine]
    return [name for name in _ALWAYS if name not in record] or parts


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
