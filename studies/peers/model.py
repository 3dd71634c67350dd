"""The model that everyone is measured with: random weights of the shape of a small Qwen3-MoE, in everyone's format.

Random weights route evenly and cost what trained ones cost; they say nothing about quality. The tokenizer has a
token for every byte and, filling the vocabulary, for pairs of bytes, so that text goes in and comes out as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.open import open_checkpoint

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
PAD, BOS, EOS = range(len(SPECIAL_TOKENS))
FIRST_ORDINARY_TOKEN = len(SPECIAL_TOKENS)
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{{ 'assistant: ' }}"
SHAPE: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 768,
    "intermediate_size": 768,
    "max_position_embeddings": 16384,  # the longest row has 8,192 tokens of context
}
QUANTIZATIONS = {
    "bf16": GGMLQuantizationType.BF16,
    "q8_0": GGMLQuantizationType.Q8_0,
    "q4_0": GGMLQuantizationType.Q4_0,
}
FOLDER = "qwen3moe"  # in Hugging Face's form, bfloat16
FILE = "qwen3moe-{}.gguf"  # by quantization
_ARCHITECTURES = {"qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE, "mixtral": gguf.MODEL_ARCH.LLAMA}  # by type in config.json


def write_folder(folder: Path, shape: dict[str, Any], *, seed: int = 0) -> None:
    """Write random bfloat16 weights, config and tokenizer, as transformers does."""
    config = Qwen3MoeConfig(
        **shape,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.normal_(0.0, 0.02, generator=generator)
            else:
                weight.fill_(1.0)
    model.save_pretrained(folder)
    _write_tokenizer(folder, config.vocab_size)


def write_gguf(
    folder: Path, file: Path, quantization: GGMLQuantizationType, *, tokenizer_file: Path | None = None
) -> None:
    """Convert a Qwen3-MoE or Mixtral in Hugging Face's form: matrices in `quantization`, router and norms in float32.

    Experts are stacked, names are gguf's. Rounding is that of llama.cpp's reference, one tensor after the other.
    A tokenizer is that of `write_folder`, or that of `tokenizer_file`, another GGUF file; others are left out: such a
    file takes token ids only.
    """
    checkpoint = open_checkpoint(folder)
    architecture = _ARCHITECTURES[checkpoint.config["model_type"]]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    try:
        _add_metadata(writer, checkpoint.config, architecture)
        tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        if tokenizer_file is not None:
            _copy_tokenizer(writer, tokenizer_file)
        elif tokenizer["model"]["vocab"].get(SPECIAL_TOKENS[PAD]) == PAD:
            _add_tokenizer(writer, tokenizer)
        else:
            writer.add_tokenizer_model("none")
        stacks = list(_stacks(checkpoint, quantization, architecture))
        for stack in stacks:
            bytes_shape = gguf.quant_shape_to_byte_shape(stack.shape, stack.kind)
            num_bytes = torch.Size(bytes_shape).numel()
            writer.add_tensor_info(stack.name, bytes_shape, np.dtype(np.uint8), num_bytes, stack.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for stack in stacks:
            values = torch.stack([checkpoint.read(name).float() for name in stack.sources]).reshape(stack.shape)
            if architecture is gguf.MODEL_ARCH.LLAMA:
                values = _with_pairs_together(stack.name, values, checkpoint.config)
            writer.write_tensor_data(gguf.quants.quantize(values.numpy(), stack.kind))
    finally:
        writer.close()
        checkpoint.close()


class _Stack(NamedTuple):
    """A tensor of the GGUF file: one of the checkpoint's, or the same matrix of all experts of a layer."""

    name: str
    sources: list[str]
    shape: tuple[int, ...]
    kind: GGMLQuantizationType


def _stacks(
    checkpoint: Checkpoint, quantization: GGMLQuantizationType, architecture: gguf.MODEL_ARCH
) -> Iterator[_Stack]:
    names = gguf.get_tensor_name_map(architecture, checkpoint.config["num_hidden_layers"])
    sources: dict[str, list[str]] = {}
    for expert in range(checkpoint.config["num_local_experts"]):
        for name in checkpoint.tensors:
            if f".experts.{expert}." in name:
                sources.setdefault(name.replace(f".experts.{expert}.", ".experts."), []).append(name)
    sources |= {name: [name] for name in checkpoint.tensors if ".experts." not in name}
    for name, parts in sources.items():
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        assert gguf_name is not None, name
        shape = checkpoint.tensors[parts[0]].shape
        stays_exact = len(shape) == 1 or "ffn_gate_inp" in gguf_name
        kind = GGMLQuantizationType.F32 if stays_exact else quantization
        yield _Stack(gguf_name, parts, shape if len(parts) == 1 else (len(parts), *shape), kind)


def _with_pairs_together(name: str, values: torch.Tensor, config: Any) -> torch.Tensor:
    """Return a matrix with the rows as this architecture wants them: numbers that rotate as a pair lie side by side."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    num_heads = next((number for matrix, number in heads.items() if f".{matrix}." in name), None)
    if num_heads is None:
        return values
    return values.reshape(num_heads, 2, -1, values.shape[1]).transpose(1, 2).reshape(values.shape).contiguous()


def _add_metadata(writer: gguf.GGUFWriter, config: Any, architecture: gguf.MODEL_ARCH) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if architecture is gguf.MODEL_ARCH.LLAMA:
        writer.add_rope_dimension_count(head_dim)
    else:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any]) -> None:
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(PAD)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _copy_tokenizer(writer: gguf.GGUFWriter, file: Path) -> None:
    for name, entry in gguf.GGUFReader(file).fields.items():
        if name.startswith("tokenizer."):
            sub_type = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, entry.contents(), entry.types[0], sub_type)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(first, second) for first in alphabet for second in alphabet]
    merges = pairs[: max(vocab_size - FIRST_ORDINARY_TOKEN - len(alphabet), 0)]
    tokens = [*SPECIAL_TOKENS, *alphabet, *("".join(pair) for pair in merges)]
    model = models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    core = Tokenizer(model)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIAL_TOKENS
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=pad, bos_token=bos, eos_token=eos)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
