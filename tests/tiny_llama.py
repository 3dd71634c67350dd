"""A random Llama with a byte-level tokenizer, written by transformers: what upcycling starts from."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tiny_mixtral import write_byte_tokenizer

HIDDEN, LAYERS, VOCAB = 32, 2, 258


def write_tiny_llama(folder: Path, **config_changes) -> LlamaForCausalLM:
    """Write the model and return transformers' own, as the oracle."""
    write_byte_tokenizer(folder)
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_theta": 5000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.3,
    }
    model = LlamaForCausalLM(LlamaConfig(**(settings | config_changes))).eval()
    model.save_pretrained(folder)
    return model
