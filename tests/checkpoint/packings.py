"""Random matrices as quantized Hugging Face folders store them, written number by number, with their values.

Each function takes rows, columns and a seed, and returns the tensors by what follows a layer's name, and its weights.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
Store = Callable[[int, int, int], Stored]
SPREAD = 0.06  # of weights


def words(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack the last dimension into words of 32 bits; `order` has the number of each place."""
    count = 32 // bits
    filled = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, -numbers.shape[-1] % count)])
    packed = np.zeros((*filled.shape[:-1], filled.shape[-1] // count), np.uint64)
    for place, number in enumerate(order or range(count)):
        packed |= filled[..., number::count].astype(np.uint64) << np.uint64(bits * place)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32))


def integers(
    rows: int, cols: int, group: int, bits: int, seed: int, dtype: torch.dtype, *, is_symmetric: bool
) -> tuple:
    """Return codes [rows, cols], scales and zero points [rows, groups], and the weights in float32."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 2**bits, (rows, cols))
    zeros = random.integers(0, 2**bits, (rows, cols // group))
    if is_symmetric:
        zeros[:] = 2 ** (bits - 1)
    scales = torch.from_numpy(random.uniform(0.5, 1.5, zeros.shape) * SPREAD * 4 / 2**bits).to(dtype)
    steps = torch.from_numpy(codes - zeros.repeat(group, axis=1)).float()
    return codes, scales, zeros, steps * scales.float().repeat_interleave(group, dim=1)


def awq(group: int = 128, dtype: torch.dtype = torch.float16) -> Store:
    def store(rows: int, cols: int, seed: int) -> Stored:
        codes, scales, zeros, weight = integers(rows, cols, group, 4, seed, dtype, is_symmetric=False)
        return {
            "qweight": words(codes.T, 4, AWQ_ORDER),
            "qzeros": words(zeros.T, 4, AWQ_ORDER),
            "scales": scales.T.contiguous(),
        }, weight

    return store


def gptq(
    bits: int = 4, group: int = 128, *, is_symmetric: bool = True, version: int = 1, dtype: torch.dtype = torch.float16
) -> Store:
    def store(rows: int, cols: int, seed: int) -> Stored:
        codes, scales, zeros, weight = integers(rows, cols, group, bits, seed, dtype, is_symmetric=is_symmetric)
        stored_zeros = (zeros - 1) % 2**bits if version == 1 else zeros
        return {
            "qweight": words(codes, bits).T.contiguous(),
            "qzeros": words(stored_zeros.T, bits),
            "scales": scales.T.contiguous(),
            "g_idx": torch.arange(cols, dtype=torch.int32) // group,
        }, weight

    return store


def pack_quantized(
    bits: int = 4, group: int = 128, *, is_symmetric: bool = True, dtype: torch.dtype = torch.bfloat16
) -> Store:
    def store(rows: int, cols: int, seed: int) -> Stored:
        codes, scales, zeros, weight = integers(rows, cols, group, bits, seed, dtype, is_symmetric=is_symmetric)
        tensors = {
            "weight_packed": words(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, cols]),
        }
        if not is_symmetric:
            tensors["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
        return tensors, weight

    return store


def int_quantized(*, of: str = "channel", dtype: torch.dtype = torch.bfloat16) -> Store:
    def store(rows: int, cols: int, seed: int) -> Stored:
        codes, scales, zeros, _ = integers(rows, cols, cols, 8, seed, dtype, is_symmetric=of != "asymmetric")
        if of == "tensor":
            scales = scales[:1, 0]
        weight = torch.from_numpy(codes - zeros).float() * scales.float()
        tensors = {"weight": torch.from_numpy(codes - 128).to(torch.int8), "weight_scale": scales}
        if of == "asymmetric":
            tensors["weight_zero_point"] = torch.from_numpy(zeros - 128).to(torch.int8)
        return tensors, weight

    return store


def float8(of: tuple[int, int] | str = (128, 128), dtype: torch.dtype = torch.float32) -> Store:
    """Scales of blocks, of each "row", or of "all"."""

    def store(rows: int, cols: int, seed: int) -> Stored:
        random = np.random.default_rng(seed)
        codes = torch.from_numpy(random.integers(0, 127, (rows, cols), dtype=np.uint8))
        codes |= torch.from_numpy(random.integers(0, 2, (rows, cols), dtype=np.uint8)) * 128
        height, width = {"row": (1, cols), "all": (rows, cols)}[of] if isinstance(of, str) else of
        shape = (-(-rows // height), -(-cols // width))
        scales = torch.from_numpy(random.uniform(0.5, 1.5, shape) * SPREAD / 100).to(dtype)
        of_weights = scales.float().repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :cols]
        weight = codes.view(torch.float8_e4m3fn)
        name = "weight_scale" if isinstance(of, str) else "weight_scale_inv"
        stored = scales.reshape(1) if of == "all" else scales
        return {"weight": weight, name: stored}, weight.float() * of_weights

    return store


def mxfp4(rows: int, cols: int, seed: int) -> Stored:
    """Written by its definition, one number after the other."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, cols // 32, 16), dtype=np.uint8)
    exponents = random.integers(117, 124, (rows, cols // 32), dtype=np.uint8)
    sizes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    levels = np.array([*sizes, *(-size for size in sizes)], np.float32)
    values = np.stack([levels[blocks % 16], levels[blocks // 16]], axis=-1).reshape(rows, cols // 32, 32)
    weight = values * (2.0 ** (exponents.astype(np.float32) - 127))[..., None]
    tensors = {"weight_blocks": torch.from_numpy(blocks), "weight_scales": torch.from_numpy(exponents)}
    return tensors, torch.from_numpy(weight.astype(np.float32).reshape(rows, cols))


def nvfp4(numbers: str, of_all: str, *, divides: bool) -> Store:
    """Written by its definition, one number after the other; `numbers` and `of_all` are names."""

    def store(rows: int, cols: int, seed: int) -> Stored:
        random = np.random.default_rng(seed)
        pairs = random.integers(0, 256, (rows, cols // 2), dtype=np.uint8)
        scales = random.integers(96, 127, (rows, cols // 16), dtype=np.uint8)
        few = random.random(scales.shape) < 0.1
        scales[few] = random.integers(0, 96, few.sum())  # the smallest, zero among them
        exponents, fractions = np.divmod(scales.astype(np.int64), 8)
        as_floats = np.where(exponents > 0, (8 + fractions) * 2.0 ** (exponents - 10), fractions * 2.0**-9)
        factor = np.float32(random.uniform(0.5, 1.5) * SPREAD / 600)
        factor = np.float32(1 / factor) if divides else factor
        steps = as_floats.astype(np.float32) / factor if divides else as_floats.astype(np.float32) * factor
        sizes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        levels = np.array([*sizes, *(-size for size in sizes)], np.float32)
        values = np.stack([levels[pairs % 16], levels[pairs // 16]], axis=-1).reshape(rows, cols)
        tensors = {
            numbers: torch.from_numpy(pairs),
            "weight_scale": torch.from_numpy(scales).view(torch.float8_e4m3fn),
            of_all: torch.tensor([factor]) if divides else torch.tensor(factor),
        }
        return tensors, torch.from_numpy(values * steps.repeat(16, axis=1))

    return store


def compressed(fmt: str, **weights: object) -> dict[str, object]:
    """Return compressed-tensors' settings."""
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _int4(**more: object) -> dict[str, object]:
    return compressed("pack-quantized", num_bits=4, strategy="group", **more)


# By name: the settings in config.json, the stored form of a matrix, and its result.
GPTQ = {"quant_method": "gptq", "desc_act": False}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
QUANTIZATIONS: dict[str, tuple[dict[str, object], Store, str]] = {
    "mxfp4": ({"quant_method": "mxfp4"}, mxfp4, "MXFP4"),
    "fp8": (FP8 | {"weight_block_size": [128, 128]}, float8(), "F8_E4M3"),
    "fp8 bf16 scales": (FP8 | {"weight_block_size": [64, 256]}, float8((64, 256), torch.bfloat16), "F8_E4M3"),
    "fp8 rows": ({"quant_method": "fbgemm_fp8"}, float8("row"), "F8_E4M3"),
    "fp8 all": (FP8, float8("all"), "F8_E4M3"),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, awq(), "INT4_G128"),
    "awq 64": ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, awq(64), "INT4_G64"),
    "awq 32": ({"quant_method": "awq", "w_bit": 4, "q_group_size": 32}, awq(32, torch.bfloat16), "INT4_G32"),
    "gptq": (GPTQ | {"bits": 4, "group_size": 128}, gptq(), "INT4_G128"),
    "gptq 32": (GPTQ | {"bits": 4, "group_size": 32}, gptq(4, 32, is_symmetric=False), "INT4_G32"),
    "gptq 8": (GPTQ | {"bits": 8, "group_size": 128}, gptq(8, is_symmetric=False), "INT8_G128"),
    "gptq v2": (
        GPTQ | {"bits": 4, "group_size": 256, "checkpoint_format": "gptq_v2"},
        gptq(4, 256, is_symmetric=False, version=2),
        "INT4_G128",
    ),
    "auto-round": (AUTO_ROUND, gptq(), "INT4_G128"),
    "auto-round awq": (AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "sym": False}, awq(), "INT4_G128"),
    "int4": (_int4(group_size=128), pack_quantized(), "INT4_G128"),
    "int4 asymmetric": (_int4(group_size=32, symmetric=False), pack_quantized(4, 32, is_symmetric=False), "INT4_G32"),
    "int8 packed": (
        compressed("pack-quantized", num_bits=8, strategy="group", group_size=128),
        pack_quantized(8),
        "INT8_G128",
    ),
    "int8": (compressed("int-quantized", num_bits=8, strategy="channel"), int_quantized(), "INT8_G128"),
    "int8 asymmetric": (
        compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False),
        int_quantized(of="asymmetric"),
        "INT8_G128",
    ),
    "int8 tensor": (
        compressed("int-quantized", num_bits=8, strategy="tensor"),
        int_quantized(of="tensor"),
        "INT8_G128",
    ),
    "float8 rows": (
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        float8("row", torch.bfloat16),
        "F8_E4M3",
    ),
    "nvfp4": (
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        nvfp4("weight_packed", "weight_global_scale", divides=True),
        "NVFP4",
    ),
    "modelopt nvfp4": (
        MODELOPT,
        nvfp4("weight", "weight_scale_2", divides=False),
        "NVFP4",
    ),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, float8("all"), "F8_E4M3"),
}
