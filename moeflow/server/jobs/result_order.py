"""Puts the results of a finished job in the order of its input."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

from moeflow.server.jobs.atomic_file import replacing


class _Result(msgspec.Struct):
    custom_id: str


def sort_results(path: Path, positions: Mapping[str, int]) -> None:
    """Sort a file's lines by the positions of their ids. Lines with unknown ids follow.

    Blocks: on the disk.
    Raises: OSError; the file is then unchanged.
    """
    path = path.resolve()  # a link stays one
    lines: list[tuple[int, int, int]] = []  # position in the input, offset and size in the file
    offset = 0
    with path.open("rb") as results:
        for line in results:
            name = msgspec.json.decode(line, type=_Result).custom_id
            lines.append((positions.get(name, len(positions)), offset, len(line)))
            offset += len(line)
        if lines == (in_order := sorted(lines)):
            return
        with replacing(path) as file:
            os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(results.fileno()).st_mode))
            for _, offset, size in in_order:
                results.seek(offset)
                file.write(results.read(size))
