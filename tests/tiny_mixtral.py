"""A random Mixtral with a byte-level tokenizer, written by transformers: a whole model folder in milliseconds."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

EOS = 1
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_tiny_mixtral(folder: Path, *, seed: int = 0, **config_changes) -> MixtralForCausalLM:
    """Write the model and return transformers' own, as the oracle."""
    write_byte_tokenizer(folder)
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 258,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": EOS,
        "initializer_range": 0.3,  # large: greedy choices are then far from ties
    }
    model = MixtralForCausalLM(MixtralConfig(**(settings | config_changes))).eval()
    model.save_pretrained(folder)
    return model


def write_byte_tokenizer(folder: Path, vocab_size: int = 258) -> None:
    """Two special tokens, then one token for every byte, then tokens that no text has."""
    vocab = {"<s>": 0, "</s>": EOS}
    vocab |= {char: 2 + index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {f"<unused{token_id}>": token_id for token_id in range(len(vocab), vocab_size)}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
