"""Writes a model of random weights of any family: few layers, wide enough that weights are what takes the time.

For `engine_vs_transformers.py` and `prompt_cache.py`: 0.3 to 0.4 billion parameters, without experts 0.1, in bfloat16,
and a tokenizer of bytes. A FOLDER that is named as its FAMILY is a row of the page's table.

python -m studies.random_family FAMILY FOLDER
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from moeflow.models.registry import FAMILIES
from studies.harness.command import run_study
from tests.tiny_mixtral import write_byte_tokenizer

BASE: Mapping[str, Any] = {
    "vocab_size": 16000,
    "hidden_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS: Mapping[str, Any] = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
LOCAL_EXPERTS: Mapping[str, Any] = {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 512}
ROUTED_EXPERTS: Mapping[str, Any] = {
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "first_k_dense_replace": 1,
}
LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 16,
    "head_dim": 32,
    "q_lora_rank": None,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
DELTA_NETS: Mapping[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 3,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
# What a family's config says beside, or instead of, what all do.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mixtral": LOCAL_EXPERTS,
    "olmoe": EXPERTS | {"intermediate_size": 512, "num_key_value_heads": 16},
    "qwen3_moe": EXPERTS,
    "dbrx": {  # keys of its own for what BASE says
        "d_model": 1024,
        "n_heads": 16,
        "n_layers": 6,
        "max_seq_len": 4096,
        "attn_config": {"kv_n_heads": 4, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 512, "moe_num_experts": 32, "moe_top_k": 4},
    },
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 1024},
    "gpt_oss": LOCAL_EXPERTS | {"layer_types": ["sliding_attention", "full_attention"] * 3},
    "glm4_moe": ROUTED_EXPERTS | {"n_group": 1, "topk_group": 1},
    "deepseek_v2": ROUTED_EXPERTS | LATENT | {"n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "deepseek_v3": ROUTED_EXPERTS | LATENT | {"n_group": 4, "topk_group": 2},
    "glm4_moe_lite": ROUTED_EXPERTS | LATENT | {"q_lora_rank": 512, "n_group": 1, "topk_group": 1},
    "dots1": ROUTED_EXPERTS | {"n_group": 1, "topk_group": 1},
    "granitemoe": LOCAL_EXPERTS,
    "granitemoeshared": LOCAL_EXPERTS | {"shared_intermediate_size": 1024},
    "hunyuan_v1_moe": {"num_experts": 32, "moe_topk": 4, "intermediate_size": 512},
    "ernie4_5_moe": {"moe_num_experts": 32, "moe_k": 4, "moe_intermediate_size": 512, "moe_layer_start_index": 1},
    "minimax_m2": LOCAL_EXPERTS,
    "phimoe": LOCAL_EXPERTS | {"num_experts_per_tok": 2},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 3},
    "gemma4_text": EXPERTS
    | {
        "enable_moe_block": True,
        "top_k_experts": 4,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "global_head_dim": 128,
        "num_global_key_value_heads": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "lfm2_moe": EXPERTS | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 3},
    "qwen3_next": EXPERTS | DELTA_NETS | {"shared_expert_intermediate_size": 512},
    "qwen3_5_moe_text": EXPERTS | DELTA_NETS | {"shared_expert_intermediate_size": 512},
    "qwen3_5_text": DELTA_NETS,
    "granitemoehybrid": LOCAL_EXPERTS
    | {
        "shared_intermediate_size": 1024,
        "layer_types": ["mamba", "attention"] * 3,
        "mamba_n_heads": 32,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
    },
}


@click.command()
@click.argument("family", type=click.Choice(sorted(set(SHAPES) & set(FAMILIES))))
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seed", default=0, show_default=True)
def main(family: str, folder: Path, seed: int) -> None:
    """Write a model of FAMILY to FOLDER."""
    model = write_model(family, folder, seed)
    click.echo(f"{folder}: {sum(it.numel() for it in model.parameters()) / 1e6:.0f} million parameters")


def write_model(family: str, folder: Path, seed: int, **changes: Any) -> PreTrainedModel:
    """Write a model whose config says `changes` beside what it would, and return it."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**{**BASE, **SHAPES[family], **changes})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    write_byte_tokenizer(folder, config.vocab_size)
    return model


if __name__ == "__main__":
    run_study(main)
