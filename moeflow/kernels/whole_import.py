"""Imports modules whole: no Ctrl-C cuts them in two, and no search for garbage goes through them meanwhile."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from moeflow.kernels.interrupts import hold_interrupts


def import_whole(name: str) -> ModuleType:
    """Import a module; a Ctrl-C, which its code might swallow or abort the process for, comes once that is done."""
    if name in sys.modules:
        return importlib.import_module(name)  # waits if another thread is in the midst of it
    with hold_interrupts(), _without_collecting():
        return importlib.import_module(name)


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Keep the garbage collector from what stays: it would go through torch many times, for a sixth of its import."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
