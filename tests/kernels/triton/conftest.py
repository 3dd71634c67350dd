"""Runs Triton kernels by Triton's interpreter, on tensors in main memory."""

import os
from typing import Any

import numpy as np
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

import triton.language as tl
from triton.runtime import interpreter


@pytest.fixture(autouse=True)
def _exact_dots_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widen the operands of `tl.dot`: the interpreter multiplies the raw bits of bfloat16."""
    create_dot = interpreter.InterpreterBuilder.create_dot

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar is not tl.bfloat16:
            return operand
        return interpreter.TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot_of_floats(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot_of_floats)


@pytest.fixture(autouse=True)
def _rounding_to_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round float32 to the nearest bfloat16, like GPUs: the interpreter cuts bits off."""
    cast = interpreter.InterpreterBuilder.cast_impl

    def rounding_cast(self: Any, source: Any, dtype: Any) -> Any:
        if source.dtype.scalar is not tl.float32 or dtype.scalar is not tl.bfloat16:
            return cast(self, source, dtype)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16).numpy()
        return interpreter.TensorHandle(rounded.view(np.uint16), dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", rounding_cast)
