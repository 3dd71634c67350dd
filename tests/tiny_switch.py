"""A random Switch Transformer, or T5, with a byte-level tokenizer, written by transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    PreTrainedModel,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.tiny_mixtral import EOS, write_byte_tokenizer

SHAPE = {
    "vocab_size": 258,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": EOS,
    "relative_attention_num_buckets": 16,
    "relative_attention_max_distance": 24,
}


def write_tiny_switch(folder: Path, *, seed: int = 0, num_experts: int = 4, **changes) -> PreTrainedModel:
    """Write a model with experts in every second layer and return transformers' own, as the oracle."""
    config = SwitchTransformersConfig(
        **(
            SHAPE
            | {
                "num_layers": 4,
                "num_sparse_encoder_layers": 2,
                "num_decoder_layers": 2,
                "num_sparse_decoder_layers": 1,
                "num_experts": num_experts,
                "expert_capacity": 10**6,  # nothing is dropped
            }
            | changes
        )
    )
    return _write(SwitchTransformersForConditionalGeneration(config), folder, seed)


def write_tiny_t5(folder: Path, *, seed: int = 0, **changes) -> PreTrainedModel:
    """Write a model without experts."""
    config = T5Config(**(SHAPE | {"num_layers": 3, "num_decoder_layers": 2} | changes))
    return _write(T5ForConditionalGeneration(config), folder, seed)


def _write(model: PreTrainedModel, folder: Path, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model.eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_norm = "norm" in name
            scale = 1.0 if "shared" in name or "bias" in name else 0.25
            weight.copy_(torch.randn(weight.shape) * (0.3 if is_norm else scale) + (1.0 if is_norm else 0.0))
        for stack in (model.encoder, model.decoder):  # separate in transformers if they are not tied to the output
            stack.embed_tokens.weight.copy_(model.shared.weight)
    write_byte_tokenizer(folder)
    model.save_pretrained(folder)
    return model
