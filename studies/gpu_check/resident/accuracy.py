"""Compares kernels with torch in float64: the same public function computes both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor

from moeflow.kernels.cpu import row_ops
from moeflow.kernels.triton import launching
from studies.gpu_check.findings import Findings
from studies.gpu_check.resident.target import Target

DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
# Largest error relative to the largest number of a row.
LIMITS: Final = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
INT8_LIMIT: Final = 1.2e-2  # of numbers that are stored as int8: rounding may go the other way
Widen = Callable[[Tensor], Tensor]


class Accuracy:
    """Draws inputs of one dtype, and records each kernel's largest error."""

    def __init__(self, target: Target, findings: Findings, dtype: torch.dtype, seed: int) -> None:
        self.target, self.dtype = target, dtype
        self._findings = findings
        self._random = torch.Generator(target.device).manual_seed(seed)

    @property
    def dtype_name(self) -> str:
        """The dtype as settings name it."""
        return str(self.dtype).removeprefix("torch.")

    def draw(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return random numbers of the dtype."""
        x = torch.randn(shape, generator=self._random, device=self.target.device)
        return x.mul_(scale).to(self.dtype)

    def bytes(self, *shape: int) -> Tensor:
        """Return random bytes: uint8."""
        return torch.randint(0, 256, shape, generator=self._random, dtype=torch.uint8, device=self.target.device)

    def permutation(self, size: int) -> Tensor:
        """Return the numbers below a size in random order."""
        return torch.randperm(size, generator=self._random, device=self.target.device)

    def check(self, kernel: str, run: Callable[[Widen], Sequence[Tensor]], *, is_int8: bool = False) -> None:
        """Compare the results of a function of inputs: of the dtype by the kernel, and in float64 by torch."""
        with self.target.kernels(), poisoned_memory():
            found = run(lambda x: x.clone())
        self.target.wait()
        with by_torch():
            wanted = run(lambda x: x.double())
        self.take(kernel, found, wanted, is_int8=is_int8)

    def take(self, kernel: str, found: Sequence[Tensor], wanted: Sequence[Tensor], *, is_int8: bool = False) -> None:
        """Record the error of results."""
        error = max(relative_error(*pair) for pair in zip(found, wanted, strict=True))
        of_kernel = self._findings.result.setdefault(kernel, {})
        largest = max(error, of_kernel.get(self.dtype_name, 0.0))
        self._findings.note(**{kernel: of_kernel | {self.dtype_name: largest}})
        limit = max(LIMITS[self.dtype], INT8_LIMIT if is_int8 else 0.0)
        if not error <= limit:
            self._findings.fault(f"{kernel}, {self.dtype_name}: an error of {error:.1e}, limit {limit:.1e}")


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Return the largest error relative to its row's largest number; infinity for NaN, and for other integers."""
    if not wanted.is_floating_point():
        return 0.0 if torch.equal(found, wanted) else math.inf
    found, wanted = found.double(), wanted.double()
    scale = wanted.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return float(((found - wanted).abs() / scale).nan_to_num(math.inf).max())


@contextmanager
def by_torch() -> Iterator[None]:
    """Have the public functions use plain torch in the block."""
    with (
        mock.patch.object(launching, "accepts", return_value=False),
        mock.patch.object(row_ops, "_AVAILABLE", False),
    ):
        yield


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill memory of floats that `torch.empty` returns in the block with NaN."""
    empty = torch.empty

    def poisoned(*arguments: Any, **options: Any) -> Tensor:
        x: Tensor = empty(*arguments, **options)
        return x.fill_(math.nan) if x.is_floating_point() else x

    with mock.patch.object(torch, "empty", poisoned):
        yield
