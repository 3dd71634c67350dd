"""What the families' `config.json` files have in common, read into `ModelConfig`.

Keys that would change the arithmetic in a way we do not compute are errors, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moeflow.core.brief import brief
from moeflow.core.model_config import ConfigReader, ModelConfig, RopeConfig

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_MSCALES = ("mscale", "mscale_all_dim")
# Far beyond what models have, and far from where positions or norms would stop being numbers.
MAX_LAYERS = 1 << 17
MIN_EPS = 1e-30
_MAX_THETA = 1e15
_MAX_FACTOR = 1e6


def read_decoder_config(
    reader: ConfigReader, *, model_type: str, default_theta: float = 10000.0, **family: Any
) -> ModelConfig:
    """Return the model's shape; `family` adds or replaces fields of `ModelConfig`.

    Raises: CheckpointError, naming the key, if one is missing, contradicts another or is not supported.
    """
    hidden_size = reader.positive("hidden_size")
    num_heads = reader.positive("num_attention_heads")
    num_kv_heads = reader.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise reader.error(
            f"'num_attention_heads' is {num_heads}, no multiple of 'num_key_value_heads', {num_kv_heads}"
        )
    head_dim = reader.positive("head_dim", max(hidden_size // num_heads, 1))
    if head_dim % 2:
        raise reader.error(f"a head has {head_dim} dimensions, where rotary positions need an even number")
    max_position = reader.positive("max_position_embeddings")
    fields: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": reader.positive("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": read_num_layers(reader),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": reader.positive("intermediate_size"),
        "max_position": max_position,
        "rms_norm_eps": reader.number("rms_norm_eps", least=MIN_EPS, most=1.0),
        "rope": _read_rope(reader, default_theta, max_position),
        "tie_word_embeddings": reader.get(bool, "tie_word_embeddings", False),
        "hidden_act": _read_activation(reader),
    }
    config = ModelConfig(**(fields | family))
    if config.top_k > config.num_experts:
        raise reader.error(f"'num_experts_per_tok' is {config.top_k}, of {config.num_experts} experts")
    return config


def read_num_layers(reader: ConfigReader) -> int:
    """Return the number of layers, which whoever reads a config may count up to."""
    return reader.positive("num_hidden_layers", most=MAX_LAYERS)


def read_num_experts(reader: ConfigReader) -> int:
    """Return the number of experts: transformers renamed the key between versions, in both directions."""
    key = "num_local_experts" if "num_local_experts" in reader.raw else "num_experts"
    return reader.positive(key)


def _read_activation(reader: ConfigReader) -> str:
    activation = reader.get(str, "hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise reader.error(f"'hidden_act' is {brief(activation)}, where only 'silu' is supported")
    return "silu"


def _read_rope(reader: ConfigReader, default_theta: float, max_position: int) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    raw = reader.raw.get("rope_parameters") or reader.raw.get("rope_scaling") or {}
    if not isinstance(raw, Mapping):
        raise reader.error(f"the rotary settings are {brief(raw)}, where an object is expected")
    rope = ConfigReader(raw, reader.file)
    kind = rope.get(str, "rope_type", rope.get(str, "type", "default"))
    if kind not in ROPE_KINDS:
        raise reader.error(f"rotary positions are of the kind {brief(kind)}; supported are {', '.join(ROPE_KINDS)}")
    _refuse_variants(reader, rope)
    theta = rope.get(float, "rope_theta", reader.get(float, "rope_theta", default_theta))
    if not 1 < theta <= _MAX_THETA:
        raise reader.error(f"'rope_theta' is {theta}, where a number above 1, up to {_MAX_THETA:g}, is expected")
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = rope.number("factor", least=1.0, most=_MAX_FACTOR)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=factor)
    original = reader.positive(
        "original_max_position_embeddings", rope.positive("original_max_position_embeddings", max_position)
    )
    bands = _read_llama3_bands(rope) if kind == "llama3" else _read_yarn_bands(rope, factor)
    return RopeConfig(theta=theta, kind=kind, factor=factor, original_max_position=original, **bands)


def _read_llama3_bands(rope: ConfigReader) -> dict[str, Any]:
    low, high = _factor(rope, "low_freq_factor"), _factor(rope, "high_freq_factor")
    if not low < high:
        raise rope.error(f"'low_freq_factor' is {low}, where less than 'high_freq_factor', {high}, is expected")
    return {"low_freq_factor": low, "high_freq_factor": high}


def _read_yarn_bands(rope: ConfigReader, factor: float) -> dict[str, Any]:
    return {
        "beta_fast": _factor(rope, "beta_fast", 32.0),
        "beta_slow": _factor(rope, "beta_slow", 1.0),
        "attention_factor": _yarn_attention_factor(rope, factor),
    }


def _factor(rope: ConfigReader, key: str, *default: float) -> float:
    return rope.number(key, *default, least=1 / _MAX_FACTOR, most=_MAX_FACTOR)


def _refuse_variants(reader: ConfigReader, rope: ConfigReader) -> None:
    partial = rope.get(float, "partial_rotary_factor", reader.get(float, "partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise reader.error(f"'partial_rotary_factor' is {partial}, where only 1 is supported")
    if not rope.get(bool, "truncate", True):
        raise reader.error("the rotary 'truncate' is false, where only true is supported")


def _yarn_attention_factor(rope: ConfigReader, factor: float) -> float | None:
    """Return the stated factor, or the one that DeepSeek's two mscale keys give; None: yarn's default."""
    mscale, mscale_all_dim = (rope.number(key, 0.0, least=0.0, most=_MAX_FACTOR) for key in _MSCALES)
    if rope.raw.get("attention_factor") is not None:
        return _factor(rope, "attention_factor")
    if not (mscale and mscale_all_dim) or factor <= 1:
        return None
    growth = 0.1 * math.log(factor)
    return (growth * mscale + 1) / (growth * mscale_all_dim + 1)
