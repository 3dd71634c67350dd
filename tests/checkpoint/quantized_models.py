"""Tiny models of any family in quantized Hugging Face folders, next to the same weights unquantized."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.packings import QUANTIZATIONS

VOCAB, HIDDEN, WIDTH, LAYERS, HEADS, KV_HEADS, EXPERTS, TOP_K = 80, 256, 256, 3, 4, 2, 4, 2
HEAD_DIM = HIDDEN // HEADS
FAMILIES = {
    "llama": ("mlp", "gate_proj up_proj down_proj"),
    "mixtral": ("block_sparse_moe", "w1 w3 w2"),
    "qwen3_moe": ("mlp", "gate_proj up_proj down_proj"),
}
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
MORE = {
    "llama": {},
    "mixtral": {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "sliding_window": None},
    "qwen3_moe": {
        "moe_intermediate_size": WIDTH,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}


def write_quantized_model(
    folder: Path, family: str, quantization: str, is_quantized: Callable[[str], bool] = lambda name: True
) -> Path:
    """Write `folder`/quantized and `folder`/plain, and return `folder`; unquantized tensors are bfloat16."""
    settings, store, _ = QUANTIZATIONS[quantization]
    parts: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    floats = {name: _floats(shape, 1000 + seed) for seed, (name, shape) in enumerate(_others(family).items())}
    for seed, (name, (rows, cols)) in enumerate(_matrices(family).items()):
        if is_quantized(name):
            stored, values[f"{name}.weight"] = store(rows, cols, seed)
            parts |= {f"{name}.{part}": tensor for part, tensor in stored.items()}
        else:
            floats[f"{name}.weight"] = _floats((rows, cols), seed)
    config = SHAPE | MORE[family] | {"model_type": family}
    _write(folder / "quantized", parts | floats, config | {"quantization_config": settings})
    _write(folder / "plain", values | {name: tensor.float() for name, tensor in floats.items()}, config)
    return folder


def stack_experts(folder: Path) -> None:
    """Store the experts of a written `mxfp4` model as stacks, an expert's gate rows before its up rows."""
    tensors = load_file(folder / "model.safetensors")
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.mlp.experts"
        for part in ("blocks", "scales"):
            gate, up, down = (
                torch.stack([tensors.pop(f"{prefix}.{expert}.{it}_proj.weight_{part}") for expert in range(EXPERTS)])
                for it in ("gate", "up", "down")
            )
            tensors[f"{prefix}.gate_up_proj_{part}"] = torch.cat([gate, up], dim=1)
            tensors[f"{prefix}.down_proj_{part}"] = down
    save_file(tensors, folder / "model.safetensors")


def _write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def _matrices(family: str) -> dict[str, tuple[int, int]]:
    block, names = FAMILIES[family]
    gate, up, down = names.split()
    found = {}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for part, rows in (("q", HEADS * HEAD_DIM), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM)):
            found[f"{prefix}.self_attn.{part}_proj"] = (rows, HIDDEN)
        found[f"{prefix}.self_attn.o_proj"] = (HIDDEN, HEADS * HEAD_DIM)
        for own in [""] if family == "llama" else [f".experts.{expert}" for expert in range(EXPERTS)]:
            found |= {f"{prefix}.{block}{own}.{it}": (WIDTH, HIDDEN) for it in (gate, up)}
            found[f"{prefix}.{block}{own}.{down}"] = (HIDDEN, WIDTH)
    return found


def _others(family: str) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        found |= {f"{prefix}.{it}_layernorm.weight": (HIDDEN,) for it in ("input", "post_attention")}
        if family == "qwen3_moe":
            found |= {f"{prefix}.self_attn.{it}_norm.weight": (HEAD_DIM,) for it in ("q", "k")}
        if family != "llama":
            found[f"{prefix}.{FAMILIES[family][0]}.gate.weight"] = (EXPERTS, HIDDEN)
    return found


def _floats(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (values * 0.1 + 1 if len(shape) == 1 else values * 0.06).bfloat16()
