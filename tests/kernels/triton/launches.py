"""Sends tensors in main memory to the Triton kernels, and counts launches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from moeflow.kernels.cpu import row_ops
from moeflow.kernels.triton import launching
from tests.kernels.triton.interpreting import language_patched_once


@contextmanager
def triton_alone(*modules: ModuleType) -> Iterator[list[Any]]:
    """Use the Triton kernels of some modules for all tensors; yield the list of started kernels.

    Memory that `torch.empty` returns is filled with NaN, or with -1 for integers.
    """
    started: list[Any] = []

    def launch(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        started.append(kernel)
        launching.launch(kernel, grid, *arguments, **constants)

    def poisoned(*arguments: Any, **options: Any) -> torch.Tensor:
        x = empty(*arguments, **options)
        return x.fill_(math.nan if x.is_floating_point() else -1)

    empty = torch.empty
    with pytest.MonkeyPatch.context() as patch, language_patched_once():
        patch.setattr(row_ops, "_AVAILABLE", False)
        patch.setattr(launching, "accepts", lambda x: True)
        patch.setattr(torch, "empty", poisoned)
        for module in modules:
            patch.setattr(module, "launch", launch)
        yield started


@contextmanager
def last_program_first() -> Iterator[None]:
    """Run the programs of each kernel in reverse order, so that none relies on those before it."""
    set_place = InterpreterBuilder.set_grid_idx

    def set_from_the_end(self: Any, *place: int) -> None:
        set_place(self, *(size - 1 - at for size, at in zip(self.grid_dim, place, strict=True)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "set_grid_idx", set_from_the_end)
        yield
