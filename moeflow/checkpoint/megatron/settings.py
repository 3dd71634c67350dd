"""Megatron's arguments of a GPT with experts, in Hugging Face's terms.

Arguments that would change the arithmetic in a way that is not computed are errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moeflow.checkpoint.tensor_file import plain_settings
from moeflow.core.errors import CheckpointError
from moeflow.core.model_config import MAX_LAYERS, ConfigReader
from moeflow.core.truncated_repr import truncated_repr

_MAX_RANKS: Final = 1024
_RANK_COUNTS: Final = ("tensor_model_parallel_size", "model_parallel_size")  # the second in old files
# Arguments that have one of these values. The first is the default.
_SUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "pipeline_model_parallel_size": (1,),
    "apply_residual_connection_post_layernorm": (False,),
    "position_embedding_type": ("learned_absolute", 2),
    "use_rotary_position_embeddings": (False,),
    "normalization": ("LayerNorm",),
    "apply_layernorm_1p": (False,),
    "add_bias_linear": (True,),
    "group_query_attention": (False,),
    "swiglu": (False,),
    "squared_relu": (False,),
    "glu_activation": (None,),
    "embed_layernorm": (False,),
    "mlp_type": ("standard",),
    "use_expert_residual_network": (False,),
    "topk": (1, 2),
}


def read_arguments(stored: Mapping[str, Any], config: Mapping[str, Any], file: Path) -> ConfigReader:
    """Return the model's arguments: those of a training, or else ModelScope's config.json. Raises: CheckpointError."""
    found = stored.get("args")
    arguments = plain_settings(config if found is None else found)
    if not arguments:
        raise CheckpointError(
            "has no arguments of a training ('args'), and there is no config.json",
            file=file,
            remedy="Take the file that Megatron saved, or add the config.json of the model's repository",
        )
    reader = ConfigReader(arguments, file)
    for name, supported in _SUPPORTED.items():
        value = arguments.get(name)
        if value is not None and value not in supported:
            raise reader.error(f"{name!r} is {truncated_repr(value)}, where only {supported[0]!r} is supported")
    return reader


def num_ranks(reader: ConfigReader, found: int) -> int:
    """Return how many tensor-parallel ranks the arguments name; `found` if they name none."""
    key = next((it for it in _RANK_COUNTS if reader.raw.get(it) is not None), _RANK_COUNTS[0])
    return reader.positive(key, found, most=_MAX_RANKS)


def translate(reader: ConfigReader) -> dict[str, Any]:
    """Return the config, but for settings that tensors tell. Raises: CheckpointError."""
    hidden_size = reader.positive("hidden_size")
    layers_key = "num_layers" if reader.raw.get("num_layers") is not None else "num_hidden_layers"
    has_tanh = reader.get(bool, "bias_gelu_fusion", True) or reader.get(bool, "openai_gelu", False)
    return {
        "model_type": "gpt_moe",
        "hidden_size": hidden_size,
        "num_hidden_layers": reader.positive(layers_key, most=MAX_LAYERS),
        "num_attention_heads": reader.positive("num_attention_heads"),
        "intermediate_size": reader.positive("ffn_hidden_size", 4 * hidden_size),
        "layer_norm_eps": reader.get(float, "layernorm_epsilon", 1e-5),
        "activation_function": "gelu_tanh" if has_tanh else "gelu",  # fused with its bias, it is approximate
        "num_experts_per_tok": reader.positive("topk", 1),
        "eos_token_id": reader.get(int, "eod_id", None),
    }
