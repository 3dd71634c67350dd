"""The processes of this server: itself, its fronts, its engines, and their ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import psutil


def own_processes() -> Sequence[psutil.Process]:
    """Return this process and all below it. Blocks: for some milliseconds, since it looks at each of the system."""
    found = [psutil.Process()]
    with contextlib.suppress(psutil.Error):
        found += found[0].children(recursive=True)
    return found
