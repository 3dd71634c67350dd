"""What fairseq's arguments say of a language model, in Hugging Face's terms.

Arguments that would change the arithmetic in a way that is not computed are errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moeflow.checkpoint.tensor_file import plain_settings
from moeflow.core.errors import CheckpointError
from moeflow.core.model_config import ConfigReader
from moeflow.core.truncated_repr import truncated_repr

PADDING: Final = 1  # fairseq's dictionaries begin with <s>, <pad>, </s>, <unk>
_END: Final = 2
_EPS: Final = 1e-5  # of its layer norms
# Arguments that have to be as they are by default.
_UNSUPPORTED: Final[Mapping[str, Any]] = {
    "no_token_positional_embeddings": False,
    "adaptive_softmax_cutoff": None,
    "adaptive_input": False,
    "character_embeddings": False,
    "layernorm_embedding": False,
    "no_decoder_final_norm": False,
    "scale_fc": False,
    "scale_heads": False,
    "scale_attn": False,
    "scale_resids": False,
    "base_layers": 0,
    "alibi": False,
    "use_moe_lang_perception": False,
    "decoder_normalize_before": True,
}


def read_arguments(stored: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """Return the model's arguments, of `cfg` or in older files `args`. Raises: CheckpointError if there are none."""
    config = stored.get("cfg")
    found = config.get("model") if isinstance(config, Mapping) else None
    found = stored.get("args") if found is None else found
    arguments = plain_settings(found)
    if arguments is None:
        raise CheckpointError(
            "has no arguments of a model in 'cfg' or 'args'", file=file, remedy="Take the file that fairseq trained"
        )
    return arguments


def translate(arguments: Mapping[str, Any], vocab_size: int, num_experts: int, file: Path) -> dict[str, Any]:
    """Return the config of a model with so many tokens and experts. Raises: CheckpointError, naming the argument."""
    reader = ConfigReader(arguments, file)
    for name, expected in _UNSUPPORTED.items():
        value = arguments.get(name)
        if value is not None and value != expected:
            raise reader.error(f"{name!r} is {truncated_repr(value)}, where only {expected!r} is supported")
    hidden_size = reader.positive("decoder_embed_dim")
    for name in ("decoder_input_dim", "decoder_output_dim"):
        if reader.get(int, name, hidden_size) != hidden_size:
            raise reader.error(
                f"{name!r} is {arguments[name]}, where {hidden_size} is supported, as 'decoder_embed_dim'"
            )
    width, frequency = reader.positive("decoder_ffn_embed_dim"), reader.get(int, "moe_freq", 0)
    length_key = "max_target_positions" if arguments.get("max_target_positions") is not None else "tokens_per_sample"
    return {
        "model_type": "fairseq_moe",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": reader.positive("decoder_layers"),
        "num_attention_heads": reader.positive("decoder_attention_heads"),
        "intermediate_size": width,
        "dense_intermediate_size": reader.get(int, "alternate_decoder_ffn_embed_dim", 0) or width,
        "max_position_embeddings": reader.positive(length_key),
        "layer_norm_eps": _EPS,
        "activation_function": reader.get(str, "activation_fn", "relu"),
        "has_learned_positions": reader.get(bool, "decoder_learned_pos", False),
        "scales_embeddings": not reader.get(bool, "no_scale_embedding", False),
        "tie_word_embeddings": reader.get(bool, "share_decoder_input_output_embed", False),
        "num_experts": num_experts,
        "moe_frequency": frequency if num_experts else 0,
        "num_experts_per_tok": 1 if reader.get(bool, "moe_top1_expert", False) else 2,
        "eos_token_id": _END,
        "pad_token_id": PADDING,
    }
