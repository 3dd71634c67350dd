"""A random LFM2 with a byte-level tokenizer: convolutions that keep states, and attention between them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

from tests.tiny_mixtral import EOS, write_byte_tokenizer


def write_tiny_lfm2(folder: Path, *, seed: int = 0, **config_changes) -> Lfm2ForCausalLM:
    """Write the model and return transformers' own, as the oracle."""
    write_byte_tokenizer(folder)
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 258,
        "hidden_size": 32,
        "intermediate_size": 48,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": EOS,
        "initializer_range": 0.3,  # large: greedy choices are then far from ties
    }
    model = Lfm2ForCausalLM(Lfm2Config(**(settings | config_changes))).eval()
    model.save_pretrained(folder)
    return model
