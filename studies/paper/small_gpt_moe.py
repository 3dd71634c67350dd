"""Writes GPT-MoE of random weights with a quarter of the thesis' layers, widths, heads and experts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from moeflow.planner.model_files import shipped_models
from tests.tiny_mixtral import write_byte_tokenizer

QUARTERED: Final = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_experts")
NUM_LETTERS: Final = 258  # of the tokenizer of bytes
STANDARD_DEVIATION: Final = 0.02


def write_small_gpt_moe(folder: Path) -> None:
    """Write the model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(shipped_models()["gpt-moe"].read_text(encoding="utf-8"))
    config |= {name: config[name] // 4 for name in QUARTERED}
    config |= {"vocab_size": NUM_LETTERS, "moe_layers": list(range(1, config["num_hidden_layers"], 2))}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    random = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=random) * STANDARD_DEVIATION if len(shape) > 1 else torch.ones(shape)
        for name, shape in _shapes(config)
    }
    save_file(tensors, folder / "model.safetensors")
    write_byte_tokenizer(folder)


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config["hidden_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.embed_positions.weight", (config["max_position_embeddings"], hidden)
    yield from _with_bias("model.norm", hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield from _with_bias(f"{prefix}.input_layernorm", hidden)
        yield from _with_bias(f"{prefix}.post_attention_layernorm", hidden)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield from _with_bias(f"{prefix}.self_attn.{name}", hidden, hidden)
        if layer not in config["moe_layers"]:
            yield from _network(f"{prefix}.mlp", hidden, config["intermediate_size"])
            continue
        yield f"{prefix}.mlp.gate.weight", (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            yield from _network(f"{prefix}.mlp.experts.{expert}", hidden, config["intermediate_size"])


def _network(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _with_bias(f"{prefix}.up_proj", width, hidden)
    yield from _with_bias(f"{prefix}.down_proj", hidden, width)


def _with_bias(name: str, *shape: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]
