"""A random Granite 4.0 with a byte-level tokenizer: Mamba2's layers, experts, and attention without positions."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

from tests.tiny_mixtral import EOS, write_byte_tokenizer


def write_tiny_granite_hybrid(folder: Path, *, seed: int = 0, **config_changes) -> GraniteMoeHybridForCausalLM:
    """Write the model and return transformers' own, as the oracle."""
    write_byte_tokenizer(folder)
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 258,
        "hidden_size": 32,
        "intermediate_size": 24,
        "shared_intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 12,
        "mamba_chunk_size": 16,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": EOS,
        "initializer_range": 0.3,  # large: greedy choices are then far from ties
    }
    model = GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**(settings | config_changes))).eval()
    model.save_pretrained(folder)
    return model
