"""Runs Triton kernels by Triton's interpreter, on tensors in main memory."""

from collections.abc import Iterator

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

from tests.kernels.triton.interpreting import exact_bfloat16, language_patched_once


@pytest.fixture(autouse=True)
def _interpreter() -> Iterator[None]:
    with exact_bfloat16(), language_patched_once():
        yield
