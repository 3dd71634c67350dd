"""What speculators are called where people read it: in statistics, metrics and pictures.

Settings name a model by its path, which is long, and hidden from clients.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Final

_GGUF: Final = re.compile(r"(-\d{5}-of-\d{5})?\.gguf")  # of a model in parts, its first's number goes, too


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Return for each name the end of its path, without .gguf: as many parts as tell all apart, and no mere number."""
    depth = 2 if any(PurePath(name).name.isdecimal() for name in names) else 1
    deepest = max((len(PurePath(name).parts) for name in names), default=1)
    while depth < deepest and len({_end(name, depth) for name in names}) < len(set(names)):
        depth += 1
    return {name: _end(name, depth) for name in names}


def _end(name: str, depth: int) -> str:
    return _GGUF.sub("", "/".join(PurePath(name).parts[-depth:]))
