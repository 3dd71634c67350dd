"""Rotary positions as `config.json` files have them: `rope_parameters` (transformers 5), or the keys before it.

Keys that would change the arithmetic in a way we do not compute are errors, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from moeflow.core.attention_config import RopeConfig
from moeflow.core.model_config import ConfigReader
from moeflow.core.truncated_repr import truncated_repr

ROPE_KINDS: Final = ("default", "linear", "llama3", "yarn")
_MSCALES: Final = ("mscale", "mscale_all_dim")
# Far beyond what models have, and far from where positions would stop being numbers.
_MAX_THETA: Final = 1e15
_MAX_FACTOR: Final = 1e6


def read_rope(
    reader: ConfigReader,
    default_theta: float,
    max_position: int,
    head_dim: int,
    *,
    may_be_partial: bool = False,
    default_share: float = 1.0,
    may_be_long: bool = False,
) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Raises: CheckpointError if a key is not supported, which one of a part of a head is unless it `may_be_partial`, and
    LongRoPE unless it `may_be_long`.
    """
    raw = reader.raw.get("rope_parameters") or reader.raw.get("rope_scaling") or {}
    if not isinstance(raw, Mapping):
        raise reader.error(f"the rotary settings are {truncated_repr(raw)}, where an object is expected")
    rope = ConfigReader(raw, reader.file)
    theta = rope.get(float, "rope_theta", reader.get(float, "rope_theta", default_theta))
    rotary_dim = _read_rotary_dim(reader, rope, head_dim, default_share)
    if rotary_dim and not may_be_partial:
        raise reader.error(f"positions rotate {rotary_dim} of a head's {head_dim} dimensions, where all are supported")
    if may_be_long and rope.get(str, "rope_type", rope.get(str, "type", "default")) == "longrope":
        return _read_long_rope(reader, rope, theta, max_position, head_dim)
    return read_rope_kind(reader, rope, theta, max_position, rotary_dim)


def _read_long_rope(
    reader: ConfigReader, rope: ConfigReader, theta: float, max_position: int, head_dim: int
) -> RopeConfig:
    """Read LongRoPE's factors and scales. The factors of short texts apply only to models without long ones."""
    original = reader.positive(
        "original_max_position_embeddings", rope.positive("original_max_position_embeddings", max_position)
    )
    length = "long" if max_position > original else "short"
    factors = rope.raw.get(f"{length}_factor")
    if (
        not isinstance(factors, list)
        or len(factors) != head_dim // 2
        or not all(type(it) in (int, float) and 1 / _MAX_FACTOR <= it <= _MAX_FACTOR for it in factors)
    ):
        raise reader.error(
            f"'{length}_factor' is {truncated_repr(factors)}, where {head_dim // 2} numbers are expected"
        )
    return RopeConfig(
        theta=_check_theta(reader, theta),
        kind="longrope",
        original_max_position=original,
        pair_factors=tuple(float(it) for it in factors),
        attention_factor=_factor(rope, f"{length}_mscale"),
    )


def _check_theta(reader: ConfigReader, theta: float) -> float:
    if not 1 < theta <= _MAX_THETA:
        raise reader.error(f"'rope_theta' is {theta}, where a number above 1, up to {_MAX_THETA:g}, is expected")
    return theta


def read_rope_kind(
    reader: ConfigReader, rope: ConfigReader, theta: float, max_position: int, rotary_dim: int = 0
) -> RopeConfig:
    """Read one set of rotary settings, which is within the config that `reader` has. Raises: CheckpointError."""
    kind = rope.get(str, "rope_type", rope.get(str, "type", "default"))
    if kind not in ROPE_KINDS:
        raise reader.error(
            f"rotary positions are of the kind {truncated_repr(kind)}; supported are {', '.join(ROPE_KINDS)}"
        )
    common: dict[str, Any] = {"theta": _check_theta(reader, theta), "rotary_dim": rotary_dim}
    if kind == "default":
        return RopeConfig(**common)
    common |= {"kind": kind, "factor": rope.number("factor", least=1.0, most=_MAX_FACTOR)}
    if kind == "linear":
        return RopeConfig(**common)
    common["original_max_position"] = reader.positive(
        "original_max_position_embeddings", rope.positive("original_max_position_embeddings", max_position)
    )
    bands = _read_llama3_bands(rope) if kind == "llama3" else _read_yarn_bands(rope, common["factor"])
    return RopeConfig(**common, **bands)


def _read_rotary_dim(reader: ConfigReader, rope: ConfigReader, head_dim: int, default_share: float) -> int:
    """Return how many dimensions of a head are rotated, 0: all."""
    stated = reader.get(int, "rotary_dim", 0)
    share = default_share
    for part in (reader, rope):
        share = part.number("partial_rotary_factor", share, least=0.0, most=1.0)
    rotary_dim = stated or int(head_dim * share)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise reader.error(f"positions rotate {rotary_dim} of a head's {head_dim} dimensions: an even part is expected")
    return 0 if rotary_dim == head_dim else rotary_dim


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
        "truncate": rope.get(bool, "truncate", True),
    }


def _factor(rope: ConfigReader, key: str, *default: float) -> float:
    return rope.number(key, *default, least=1 / _MAX_FACTOR, most=_MAX_FACTOR)


def _yarn_attention_factor(rope: ConfigReader, factor: float) -> float | None:
    """Return the stated factor, or the one that DeepSeek's two mscale keys give; None: yarn's default."""
    mscale, mscale_all_dim = (rope.number(key, 0.0, least=0.0, most=_MAX_FACTOR) for key in _MSCALES)
    if rope.raw.get("attention_factor") is not None:
        return _factor(rope, "attention_factor")
    if not (mscale and mscale_all_dim) or factor <= 1:
        return None
    growth = 0.1 * math.log(factor)
    return (growth * mscale + 1) / (growth * mscale_all_dim + 1)
