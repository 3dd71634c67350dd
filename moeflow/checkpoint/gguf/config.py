"""A GGUF file's metadata as the `config.json` that the same model has in a Hugging Face folder.

So models read one form, whatever the file. Metadata that would change the arithmetic and has no counterpart
is refused, never dropped silently. Reads no weights; the table of rotary factors is handed in.

Source: the keys of gguf.constants; what llama.cpp takes as default where a key is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moeflow.checkpoint.gguf.architecture import Architecture
from moeflow.checkpoint.gguf.header import GGUFHeader
from moeflow.checkpoint.gguf.latent import latent_keys
from moeflow.checkpoint.gguf.local_heads import local_head_keys
from moeflow.checkpoint.gguf.recurrent import key_heads
from moeflow.checkpoint.gguf.rope import (
    LONG_TABLES,
    ReadTable,
    read_factors,
    scaling_from_factors,
    scaling_from_metadata,
    scaling_from_tables,
)
from moeflow.checkpoint.gguf.token_ids import translate_token_ids
from moeflow.core.errors import CheckpointError
from moeflow.core.model_config import MAX_LAYERS, ConfigReader
from moeflow.core.truncated_repr import truncated_repr

# Metadata that changes the arithmetic -> values under which it does not.
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "attention.clamp_kqv": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "leading_dense_block_count": (0,),
    "interleave_moe_layer_step": (0, 1),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_attn_factor": (-1.0, 1.0),
}

# Defaults of sampling -> their names in generation_config.json.
_SAMPLING_KEYS: Mapping[str, str] = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def translate_config(
    header: GGUFHeader, architecture: Architecture, read_table: ReadTable, file: Path
) -> dict[str, Any]:
    """Return the Hugging Face config; `read_table` gives a table of rotary factors [D/2] that the file has.

    Raises: CheckpointError if a key is missing, of the wrong type, or means something unsupported.
    """
    reader = _SectionReader(header.metadata, file)
    is_long = architecture.may_be_long and LONG_TABLES["long"] in header.tensors
    understood = architecture.understood | ({"rope.scaling.attn_factor"} if is_long else set())
    for key, neutral in _NEUTRAL_VALUES.items():
        if key not in understood and reader.raw.get(key, neutral[0]) not in neutral:
            raise reader.error(f"{key!r} is {truncated_repr(reader.raw[key])}, which is not supported")
    if reader.raw.get("expert_gating_func", 0) not in architecture.gatings:
        raise reader.error(
            f"'expert_gating_func' is {truncated_repr(reader.raw['expert_gating_func'])}, which is not supported"
        )
    embeddings = header.tensors.get("token_embd.weight")
    config: dict[str, Any] = {
        "architectures": [architecture.huggingface_class],
        "model_type": architecture.model_type,
        "vocab_size": reader.positive("vocab_size", embeddings.shape[0] if embeddings else 0),
        "hidden_size": reader.positive("embedding_length"),
        "num_hidden_layers": reader.positive("block_count", most=MAX_LAYERS),
        "num_attention_heads": reader.positive("attention.head_count"),
        "max_position_embeddings": reader.positive("context_length"),
        "rms_norm_eps": reader.get(float, architecture.eps_key),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
        "lm_head_bias": "output.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    config |= _attention_keys(header, architecture, reader, read_table)
    config |= {key: reader.positive(source) for key, source in architecture.integers.items()}
    config |= {key: _optional(reader, *source) for key, source in architecture.optional.items()}
    if architecture.may_be_partial:
        config["rotary_dim"] = reader.positive("rope.dimension_count", config["head_dim"])
    config["num_hidden_layers"] -= config.get("num_nextn_predict_layers", 0)
    return dict(architecture.derive(config)) | dict(architecture.constants) | translate_token_ids(header.metadata, file)


def _attention_keys(
    header: GGUFHeader, architecture: Architecture, reader: ConfigReader, read_table: ReadTable
) -> dict[str, Any]:
    """Return the keys of heads, positions, and token mixers of layers without attention."""
    if architecture.has_local_heads:
        return local_head_keys(reader, header.tensors, read_table)
    num_heads = reader.positive("attention.head_count")
    num_kv_heads, layer_types = key_heads(reader, num_heads, architecture.layer_kinds)
    head_dim = (
        reader.positive("rope.dimension_count")
        if architecture.is_latent
        else _head_dim(reader, num_heads, may_be_partial=architecture.may_be_partial)
    )
    config: dict[str, Any] = {"num_key_value_heads": num_kv_heads, "head_dim": head_dim}
    config |= _rope_config(header, head_dim, read_table, reader, may_be_long=architecture.may_be_long)
    if config["rope_scaling"] is not None:
        config["rope_scaling"] |= architecture.scaling
    if architecture.is_latent:
        config |= latent_keys(reader, num_heads, config["rope_scaling"])
        config["attention_bias"] = "blk.0.attn_kv_a_mqa.bias" in header.tensors
    if layer_types is not None:
        config["layer_types"] = layer_types
        config |= architecture.mixer_keys(reader) if architecture.mixer_keys else {}
    return config


def translate_sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return defaults of sampling by their names in `generation_config.json`."""
    given = {name: metadata[key] for key, name in _SAMPLING_KEYS.items() if key in metadata}
    return {name: _shortest(value) for name, value in given.items()}


def _shortest(value: Any) -> Any:
    """Return a float32 as the shortest number that rounds to it: 0.7, not 0.699999988."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


class _SectionReader(ConfigReader):
    """Reads the keys that begin with the architecture's name, by the rest of the key."""

    def __init__(self, metadata: Mapping[str, Any], file: Path) -> None:
        self._prefix = f"{metadata['general.architecture']}."
        section = {
            key.removeprefix(self._prefix): value for key, value in metadata.items() if key.startswith(self._prefix)
        }
        super().__init__(section, file)

    def error(self, problem: str) -> CheckpointError:
        return super().error(f"metadata {self._prefix}*: {problem}")


def _optional(reader: ConfigReader, key: str, default: float | bool) -> float | bool:
    """Return a flag, or a number from 0; a factor of 0 is llama.cpp's for none."""
    if isinstance(default, bool):
        return reader.get(bool, key, default)
    number = reader.number(key, default, least=0, most=2**31)
    return (number or default) if isinstance(default, float) else int(number)


def _head_dim(reader: ConfigReader, num_heads: int, *, may_be_partial: bool) -> int:
    width = max(reader.positive("embedding_length") // num_heads, 1)
    head_dim = reader.positive("attention.key_length", width)
    for key in ("attention.value_length", *(() if may_be_partial else ("rope.dimension_count",))):
        if reader.positive(key, head_dim) != head_dim:
            raise reader.error(f"{key!r} is {reader.raw[key]}, a head has {head_dim} dimensions: not supported")
    return head_dim


def _rope_config(
    header: GGUFHeader, head_dim: int, read_table: ReadTable, reader: ConfigReader, *, may_be_long: bool
) -> dict[str, Any]:
    theta = reader.get(float, "rope.freq_base", 10000.0)
    if theta <= 0.0:
        raise reader.error(f"'rope.freq_base' is {theta}, where a positive number is expected")
    if may_be_long and LONG_TABLES["long"] in header.tensors:
        return {"rope_theta": theta, "rope_scaling": scaling_from_tables(read_table, reader)}
    factors = read_factors(header.tensors, head_dim, read_table, reader.file)
    scaling = scaling_from_metadata(reader) if factors is None else scaling_from_factors(factors, theta, reader)
    return {"rope_theta": theta, "rope_scaling": scaling}
