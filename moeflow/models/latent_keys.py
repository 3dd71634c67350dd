"""Latent attention as `config.json` files of DeepSeek's families have it.

Keys that would change the arithmetic in a way we do not compute are errors, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from moeflow.core.attention_config import LatentConfig, RopeConfig
from moeflow.core.model_config import ConfigReader
from moeflow.models.rope_keys import read_rope

_NORM_EPS: Final = 1e-6  # of norms between projections: in no config
_MAX_MSCALE: Final = 1e6


def read_latent_fields(reader: ConfigReader, *, is_interleaved: bool) -> dict[str, Any]:
    """Return fields of `ModelConfig` for a model whose attention is latent.

    Raises: CheckpointError if a key is missing, contradicts another or is not supported.
    """
    latent = LatentConfig(
        q_lora_rank=None if reader.raw.get("q_lora_rank") is None else reader.positive("q_lora_rank"),
        kv_lora_rank=reader.positive("kv_lora_rank"),
        nope_head_dim=reader.positive("qk_nope_head_dim"),
        rope_head_dim=reader.positive("qk_rope_head_dim"),
        value_head_dim=reader.positive("v_head_dim"),
        norm_eps=_NORM_EPS,
    )
    for key, dim in (("kv_lora_rank", latent.kv_lora_rank), ("qk_rope_head_dim", latent.rope_head_dim)):
        if dim % 2:
            raise reader.error(f"{key!r} is {dim}, where an even number is expected")
    has_bias = reader.get(bool, "attention_bias", False)
    if has_bias and latent.q_lora_rank is None:
        raise reader.error("'attention_bias' is true without 'q_lora_rank', which is not supported")
    rope = read_rope(reader, 10000.0, reader.positive("max_position_embeddings"), latent.rope_head_dim)
    return {
        "latent": latent,
        "num_kv_heads": 1,
        "head_dim": latent.kv_lora_rank + latent.rope_head_dim,
        "rope": replace(rope, rotary_dim=latent.rope_head_dim, is_interleaved=is_interleaved),
        "score_scale": _scale(reader, latent, rope),
        "qkv_bias": has_bias,
        "out_bias": has_bias,
    }


def _scale(reader: ConfigReader, latent: LatentConfig, rope: RopeConfig) -> float:
    """Return the scale of scores, which grows with the context that rotary positions are stretched to."""
    scale = 1 / math.sqrt(latent.query_dim)
    raw = reader.raw.get("rope_parameters") or reader.raw.get("rope_scaling") or {}
    assert isinstance(raw, Mapping)  # the reader of rotary positions refused others
    mscale = ConfigReader(raw, reader.file).number("mscale_all_dim", 0.0, least=0.0, most=_MAX_MSCALE)
    if rope.kind == "default" or not mscale or rope.factor <= 1:
        return scale
    growth = 0.1 * mscale * math.log(rope.factor) + 1.0
    return scale * growth * growth
