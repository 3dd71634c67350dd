"""The kernels of paged attention, as they are compiled for layers of well-known models."""

from dataclasses import dataclass

import torch

from moeflow.kernels.triton.attention_kernels import attention_kernel, combine_kernel
from moeflow.kernels.triton.attention_tiles import tile_of
from moeflow.kernels.triton.launching import GPU
from tests.kernels.triton.ahead_of_time import Case

TYPES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int8: "*i8"}
POINTERS = {
    "key_scales_ptr": "*fp32",
    "value_scales_ptr": "*fp32",
    "sequences_ptr": "*i32",
    "block_ids_ptr": "*i32",
    "tree_masks_ptr": "*i64",
    "sinks_ptr": "*fp32",
    "sums_ptr": "*fp32",
    "stats_ptr": "*fp32",
}
STRIDES = ("q_token_stride", "q_head_stride", "block_stride", "head_stride", "scale_block_stride", "scale_head_stride")
TENSOR_CORES = (80, 89, 90)


@dataclass(frozen=True)
class Layer:
    """A layer's shape."""

    name: str
    group: int  # query heads of a KV head
    head_dim: int = 128
    latent_dim: int = 0
    is_gpt_oss: bool = False  # a window and sinks
    kv_dtype: torch.dtype | None = None  # None: that of queries

    def case(
        self, num_tokens: int, capability: int, dtype: torch.dtype = torch.bfloat16, *, has_trees: bool = False
    ) -> Case:
        """Return the case of passes with so many tokens of a sequence; decodes share a sequence."""
        value_dim = self.latent_dim or self.head_dim
        tile = tile_of(GPU(capability, 1), num_rows=num_tokens * self.group, value_dim=value_dim, dtype=dtype)
        kv = self.kv_dtype or dtype
        signature = {
            "q_ptr": TYPES[dtype],
            "keys_ptr": TYPES[kv],
            "values_ptr": TYPES[kv],
            "out_ptr": TYPES[dtype],
            **POINTERS,
            **dict.fromkeys((*STRIDES, "num_tokens", "window", "num_splits"), "i32"),
            **dict.fromkeys(("scale", "soft_cap"), "fp32"),
        }
        constants = {
            "has_window": self.is_gpt_oss,
            "has_trees": has_trees,
            "has_scales": kv is torch.int8,
            "has_sinks": self.is_gpt_oss,
            "has_soft_cap": False,
            "is_split": num_tokens <= 8,
            "group": self.group,
            "head_dim": self.head_dim,
            "latent_dim": self.latent_dim,
            "block_size": 16,
            "run": 16,
            "tile_rows": tile.rows,
            "tile_tokens": tile.tokens,
        }
        return Case(
            f"{self.name}, {num_tokens} tokens, trees {has_trees}",
            attention_kernel,
            {name: signature[name] for name in attention_kernel.arg_names if name in signature},
            constants,
            aligned=(*(name for name in signature if name.endswith("_ptr")), *STRIDES),
            options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
            has_dot=capability >= 80,
            capabilities=(capability,),
        )


QWEN = Layer("Qwen3-30B-A3B", 8)
GPT_OSS = Layer("gpt-oss", 8, 64, is_gpt_oss=True)
INT8 = Layer("Qwen3-30B-A3B of int8", 8, kv_dtype=torch.int8)
MLA = Layer("DeepSeek-V3", 128, 576, 512)
SMALL_MLA = Layer("DeepSeek-V2-Lite", 16, 576, 512)


def combined(name: str, *, value_dim: int, has_gates: bool) -> Case:
    """Return the case of partial results of decodes."""
    constants = {
        "has_window": False,
        "has_trees": False,
        "has_gates": has_gates,
        "tile_tokens": 64,
        "value_dim": value_dim,
        "part_dims": 128,
        "most_splits": 64,
        "most_sequences": 16,
    }
    signature = {
        "sums_ptr": "*fp32",
        "stats_ptr": "*fp32",
        "out_ptr": "*bf16",
        "sequences_ptr": "*i32",
        "gates_ptr": "*bf16",
        **dict.fromkeys(("gate_stride", "num_sequences", "window", "num_splits"), "i32"),
    }
    pointers = ("sums_ptr", "stats_ptr", "out_ptr", "sequences_ptr", "gates_ptr", "gate_stride")
    return Case(name, combine_kernel, signature, constants, pointers, {"num_warps": 4})


CASES = [
    combined("sum of partial results", value_dim=128, has_gates=False),
    combined("Qwen3-Next, sum of partial results", value_dim=256, has_gates=True),
    QWEN.case(1, 75, torch.float16),
    *(QWEN.case(num_tokens, it) for num_tokens in (1, 4096) for it in TENSOR_CORES),
    QWEN.case(8, 80, has_trees=True),
    *(GPT_OSS.case(num_tokens, it) for num_tokens in (1, 4096) for it in (80, 90)),
    *(layer.case(1, it) for layer in (INT8, MLA) for it in (80, 90)),
    SMALL_MLA.case(1, 89),
]
