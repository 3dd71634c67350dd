"""Corrects bfloat16 in Triton's interpreter, and spares it repeated work."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def exact_bfloat16() -> Iterator[None]:
    """Compute with bfloat16 like GPUs: the interpreter multiplies raw bits, and cuts bits off in conversions."""
    builder = interpreter.InterpreterBuilder
    create_dot, cast = builder.create_dot, builder.cast_impl

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar is not tl.bfloat16:
            return operand
        return interpreter.TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot_of_floats(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *others)

    def rounding_cast(self: Any, source: Any, dtype: Any) -> Any:
        is_number = source.dtype.scalar is tl.float32 or source.dtype.scalar.is_int()
        if not is_number or dtype.scalar is not tl.bfloat16:
            return cast(self, source, dtype)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data, np.float32)).bfloat16().view(torch.int16).numpy()
        return interpreter.TensorHandle(rounded.view(np.uint16), dtype.scalar)

    with (
        mock.patch.object(builder, "create_dot", create_dot_of_floats),
        mock.patch.object(builder, "cast_impl", rounding_cast),
    ):
        yield


@contextmanager
def language_patched_once() -> Iterator[None]:
    """Replace the language's functions once a launch: the interpreter does so again at each call within a kernel."""
    patch = interpreter._patch_lang

    @functools.cache
    def languages_of(function: Any) -> list[Any]:
        return [it for it in function.__globals__.values() if it is tl or it is tl.core]

    def patch_if_needed(function: Any) -> Any:
        languages = languages_of(function)
        if any(tl.core.is_builtin(language.arange) for language in languages):
            return patch(function)
        return interpreter._LangPatchScope()

    with mock.patch.object(interpreter, "_patch_lang", patch_if_needed):
        yield
