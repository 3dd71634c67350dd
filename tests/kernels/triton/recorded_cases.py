"""Makes cases for ahead-of-time compilation of a call of a wrapper, as it would start kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moeflow.kernels.triton import experts, grouped_products, launching, matrix_products, normed_experts
from tests.kernels.triton.ahead_of_time import Case

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
OPTIONS = ("num_warps", "num_stages")
PRODUCTS_WITH_DOT = ("expert_kernel", "tile_kernel")


def recorded(name: str, call: Callable[[], Any], capability: int) -> list[Case]:
    """Return a case for each kernel that the call starts on a GPU of this capability; its tensors are on "meta"."""
    cases: list[Case] = []

    def record(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        cases.append(_case(f"{name}, {kernel.__name__} {len(cases)}", kernel, arguments, constants, capability))

    with pytest.MonkeyPatch.context() as patch:
        for module in (experts, matrix_products, normed_experts):
            patch.setattr(module, "launch", record)
        patch.setattr(grouped_products, "CAPABILITY", None)
        patch.setattr(matrix_products, "gpu_of", lambda x: launching.GPU(capability, 132))
        call()
    return cases


def _case(name: str, kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], capability: int) -> Case:
    named = dict(zip(kernel.arg_names, arguments, strict=False))
    return Case(
        name,
        kernel,
        {argument: _type(value) for argument, value in named.items()},
        {key: value for key, value in constants.items() if key not in OPTIONS},
        aligned=tuple(argument for argument, value in named.items() if _is_aligned(value)),
        options={key: value for key, value in constants.items() if key in OPTIONS},
        has_dot=kernel.__name__ in PRODUCTS_WITH_DOT and arguments[0].dtype != torch.float32,
        has_wide_loads=kernel.__name__ != "sort_kernel",
        capabilities=(capability,),
    )


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"


def _is_aligned(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
