"""Tensors of GGUF files whose rows are several tensors of Hugging Face: which rows are which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = range | NDArray[np.int64]
# config.json's keys -> the names of the tensors below the layer, and which rows are theirs
Cut = Callable[[Mapping[str, Any]], Mapping[str, Rows]]


def cut_attention(config: Mapping[str, Any]) -> Mapping[str, Rows]:
    """Queries, keys and values, one below the other."""
    head_dim = config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    bounds = pairwise(accumulate((queries, keys, keys), initial=0))
    return {f"self_attn.{part}_proj": range(*bound) for part, bound in zip("qkv", bounds, strict=True)}


def cut_rates_and_steps(config: Mapping[str, Any]) -> Mapping[str, Rows]:
    """Rates and steps of a gated delta net: those of a key head's heads side by side."""
    rates, steps = _by_key_heads(config, ("rate", "step"))
    return {"linear_attn.in_proj_b": rates, "linear_attn.in_proj_a": steps}


def cut_all_of_key_heads(config: Mapping[str, Any]) -> Mapping[str, Rows]:
    """Queries, keys, values and gates of a gated delta net: those of a key head side by side."""
    queries, keys, values, gates = _by_key_heads(config, ("key", "key", "value", "value"))
    return {"linear_attn.in_proj_qkv": np.concatenate([queries, keys, values]), "linear_attn.in_proj_z": gates}


def _by_key_heads(config: Mapping[str, Any], parts: tuple[str, ...]) -> list[NDArray[np.int64]]:
    """Return the rows of each part, where those of one key head lie side by side."""
    num_keys = config["linear_num_key_heads"]
    per_key = max(config["linear_num_value_heads"] // num_keys, 1)
    sizes = {
        "key": config["linear_key_head_dim"],
        "value": per_key * config["linear_value_head_dim"],
        "rate": per_key,
        "step": per_key,
    }
    widths = [sizes[part] for part in parts]
    rows = np.arange(num_keys * sum(widths)).reshape(num_keys, -1)
    return [part.reshape(-1) for part in np.split(rows, list(accumulate(widths))[:-1], axis=1)]
