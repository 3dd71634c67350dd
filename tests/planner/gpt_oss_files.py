"""Folders with the headers of gpt-oss models, whose files hold zeros alone and so take no space on disk."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2880, 64, 8, 64, 201_088
SIZES = {"U8": 1, "BF16": 2}


def write_headers(folder: Path, *, num_layers: int, num_experts: int) -> str:
    """Write the model, its experts in MXFP4 and all else in bfloat16, and return its path."""
    config = {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": num_layers,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "num_local_experts": num_experts,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 131_072,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4"},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, (dtype, shape) in _tensors(num_layers, num_experts).items():
        size = prod(shape) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return str(folder)


def _tensors(num_layers: int, num_experts: int) -> dict[str, tuple[str, list[int]]]:
    def floats(*shape: int) -> tuple[str, list[int]]:
        return "BF16", [*shape]

    found = {
        "model.embed_tokens.weight": floats(VOCAB, HIDDEN),
        "model.norm.weight": floats(HIDDEN),
        "lm_head.weight": floats(VOCAB, HIDDEN),
    }
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        parts = {
            "input_layernorm.weight": floats(HIDDEN),
            "post_attention_layernorm.weight": floats(HIDDEN),
            "self_attn.sinks": floats(HEADS),
            "mlp.router.weight": floats(num_experts, HIDDEN),
            "mlp.router.bias": floats(num_experts),
        }
        for name, rows, cols in (
            ("q", queries, HIDDEN),
            ("k", keys, HIDDEN),
            ("v", keys, HIDDEN),
            ("o", HIDDEN, queries),
        ):
            parts[f"self_attn.{name}_proj.weight"] = floats(rows, cols)
            parts[f"self_attn.{name}_proj.bias"] = floats(rows)
        for name, rows in (("gate_up", 2 * HIDDEN), ("down", HIDDEN)):
            parts[f"mlp.experts.{name}_proj_blocks"] = ("U8", [num_experts, rows, HIDDEN // 32, 16])
            parts[f"mlp.experts.{name}_proj_scales"] = ("U8", [num_experts, rows, HIDDEN // 32])
            parts[f"mlp.experts.{name}_proj_bias"] = floats(num_experts, rows)
        found |= {f"{prefix}.{name}": part for name, part in parts.items()}
    return found
