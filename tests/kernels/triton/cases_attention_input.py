"""The kernels before attention, as they are compiled."""

from typing import Any

from moeflow.kernels.triton.attention_input import attention_input_kernel
from moeflow.kernels.triton.kv_cache import write_kv_kernel
from moeflow.kernels.triton.kv_moves import move_kv_kernel
from moeflow.kernels.triton.latent_input import latent_input_kernel
from tests.kernels.triton.ahead_of_time import Case

INPUTS = ("qkv_ptr", "q_norm_ptr", "k_norm_ptr", "v_norm_ptr", "cos_ptr", "sin_ptr", "queries_ptr")
NUMBERS = ("stride", "num_heads", "num_kv_heads", "head_dim", "rotary_dim")


def case(name: str, block_heads: int, block_dim: int, num_warps: int, *, kv: str = "bf16", **ways: Any) -> Case:
    """Return the case of a model, in bfloat16."""
    constants = {
        "has_q_norm": True,
        "has_k_norm": True,
        "has_v_norm": False,
        "norms_all_heads": False,
        "norms_last": False,
        "has_clip": False,
        "has_rotary": True,
        "is_interleaved": False,
        "block_size": 16,
        "is_int8": kv == "i8",
        "block_heads": block_heads,
        "block_dim": block_dim,
    } | ways
    signature = dict.fromkeys(INPUTS, "*bf16") | {"slots_ptr": "*i64", "cells_ptr": f"*{kv}"}
    signature |= {"scales_ptr": "*fp32" if kv == "i8" else f"*{kv}"} | dict.fromkeys(NUMBERS, "i32")
    signature |= {"eps": "fp32", "clip": "fp32"}
    aligned = (*INPUTS, "slots_ptr", "cells_ptr", "scales_ptr", "stride", "head_dim", "rotary_dim")
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    return Case(
        name,
        attention_input_kernel,
        signature,
        constants,
        aligned,
        options,
        has_wide_loads=not ways.get("is_interleaved"),
    )


def write_case(name: str, block_heads: int, block_dim: int, *, is_latent: bool, kv: str) -> Case:
    """Return a case of storing keys and values alone."""
    constants = {
        "block_size": 16,
        "is_latent": is_latent,
        "is_int8": kv == "i8",
        "block_heads": block_heads,
        "block_dim": block_dim,
        "block_rest": 64,
    }
    signature = {"k_ptr": "*bf16", "v_ptr": "*bf16", "slots_ptr": "*i64", "cells_ptr": f"*{kv}", "scales_ptr": "*fp32"}
    signature |= dict.fromkeys(("k_stride", "v_stride", "num_kv_heads", "head_dim", "latent_dim"), "i32")
    aligned = (
        "k_ptr",
        "v_ptr",
        "slots_ptr",
        "cells_ptr",
        "scales_ptr",
        "k_stride",
        "v_stride",
        "head_dim",
        "latent_dim",
    )
    return Case(name, write_kv_kernel, signature, constants, aligned, {"num_warps": 1, "enable_fp_fusion": False})


def move_case(name: str, head_dim: int, *, is_latent: bool, kv: str) -> Case:
    """Return a case of moves of drafted tokens."""
    constants = {"block_size": 16, "is_latent": is_latent, "is_int8": kv == "i8", "block_dim": head_dim}
    signature = {
        **dict.fromkeys(("from_ptr", "to_ptr"), "*i64"),
        "num_moves": "i32",
        "cells_ptr": f"*{kv}",
        "scales_ptr": "*fp32",
        **dict.fromkeys(("num_kv_heads", "head_dim"), "i32"),
    }
    aligned = ("from_ptr", "to_ptr", "cells_ptr", "scales_ptr", "head_dim")
    return Case(name, move_kv_kernel, signature, constants, aligned, {"num_warps": 1}, has_wide_loads=False)


def latent_case(name: str, *, kv: str, is_absorbed: bool) -> Case:
    """Return a case of DeepSeek-V3's latent attention."""
    constants = {
        "is_interleaved": True,
        "block_size": 16,
        "is_int8": kv == "i8",
        "block_heads": 8,
        "block_rope": 64,
        "block_latent": 512,
        "is_absorbed": is_absorbed,
        "block_nope": 128,
        "block_tokens": 16,
        "block_columns": 64,
    }
    inputs = ("q_ptr", "kept_ptr", "up_ptr", "norm_ptr", "cos_ptr", "sin_ptr", "queries_ptr")
    signature = dict.fromkeys(inputs, "*bf16") | {"slots_ptr": "*i64", "cells_ptr": f"*{kv}", "scales_ptr": "*fp32"}
    numbers = ("q_stride", "kept_stride", "up_stride", "num_heads", "nope_dim", "rope_dim", "latent_dim")
    signature |= dict.fromkeys(("num_tokens", *numbers), "i32") | {"eps": "fp32"}
    aligned = (*inputs, "slots_ptr", "cells_ptr", "scales_ptr", *numbers)
    return Case(
        name,
        latent_input_kernel,
        {argument: signature[argument] for argument in latent_input_kernel.arg_names if argument in signature},
        constants,
        aligned,
        {"num_warps": 4 if is_absorbed else 1, "enable_fp_fusion": False},
        has_dot=is_absorbed,
        capabilities=(80, 89, 90) if is_absorbed else (75, 80, 89, 90),
    )


CASES = [
    case("qwen3, before attention", 4, 128, 1),
    case("qwen3, before attention, int8", 4, 128, 1, kv="i8"),
    case("gpt-oss, before attention", 8, 64, 1, has_q_norm=False, has_k_norm=False),
    case("olmoe, before attention", 16, 128, 4, norms_all_heads=True),
    case("minimax-m2, before attention", 64, 128, 8, norms_all_heads=True),
    case("glm-4, before attention", 4, 128, 1, is_interleaved=True, has_q_norm=False, has_k_norm=False),
    write_case("keys and values", 4, 128, is_latent=False, kv="bf16"),
    write_case("latents, int8", 1, 512, is_latent=True, kv="i8"),
    move_case("moves of keys and values", 128, is_latent=False, kv="bf16"),
    move_case("moves of latents, int8", 1024, is_latent=True, kv="i8"),
    latent_case("deepseek-v3, prompt before attention", kv="bf16", is_absorbed=False),
    latent_case("deepseek-v3, before attention", kv="bf16", is_absorbed=True),
    latent_case("deepseek-v3, before attention, int8", kv="i8", is_absorbed=True),
]
