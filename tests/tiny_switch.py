"""A random Switch Transformer, or T5, with a byte-level tokenizer, written by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    PreTrainedModel,
    SwitchTransformersConfig,
    SwitchTransformersEncoderModel,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5EncoderModel,
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


def write_tiny_encoder(folder: Path, *, is_t5: bool = False, num_experts: int = 4, **changes) -> PreTrainedModel:
    """Write a model without a decoder."""
    if is_t5:
        return _write(T5EncoderModel(T5Config(**(SHAPE | {"num_layers": 3} | changes))), folder, 0)
    sizes = {"num_layers": 4, "num_sparse_encoder_layers": 2, "num_experts": num_experts, "expert_capacity": 10**6}
    return _write(SwitchTransformersEncoderModel(SwitchTransformersConfig(**(SHAPE | sizes | changes))), folder, 0)


LABELS = ("bad", "fair", "good")


def write_tiny_classifier(folder: Path, **changes) -> tuple[PreTrainedModel, torch.nn.Linear]:
    """Write an encoder with a head over the mean of its states, and return both."""
    encoder = write_tiny_encoder(folder, **changes)
    head = torch.nn.Linear(SHAPE["d_model"], len(LABELS))
    torch.nn.init.normal_(head.weight)
    torch.nn.init.normal_(head.bias)
    tensors = {name: weight.contiguous() for name, weight in encoder.state_dict().items() if "embed_tokens" not in name}
    save_file(
        tensors | {f"score.{name}": it.detach() for name, it in head.named_parameters()}, folder / "model.safetensors"
    )
    file = folder / "config.json"
    named = {"architectures": ["SwitchTransformersForSequenceClassification"], "id2label": dict(enumerate(LABELS))}
    file.write_text(json.dumps(json.loads(file.read_text()) | named))
    return encoder, head


def _write(model: PreTrainedModel, folder: Path, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model.eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_norm = "norm" in name
            scale = 1.0 if "shared" in name or "bias" in name else 0.25
            weight.copy_(torch.randn(weight.shape) * (0.3 if is_norm else scale) + (1.0 if is_norm else 0.0))
        for stack in (
            model.encoder,
            *([model.decoder] if hasattr(model, "decoder") else []),
        ):  # separate in transformers if they are not tied to the output
            stack.embed_tokens.weight.copy_(model.shared.weight)
    write_byte_tokenizer(folder)
    model.save_pretrained(folder)
    return model
