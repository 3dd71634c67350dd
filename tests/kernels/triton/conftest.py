"""Runs Triton kernels by Triton's interpreter, on tensors in main memory."""

from collections.abc import Iterator

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

from tests.kernels.triton.interpreting import exact_bfloat16


@pytest.fixture(autouse=True)
def _bfloat16_of_a_gpu() -> Iterator[None]:
    with exact_bfloat16():
        yield
