"""Tensors of GGUF files whose rows are several tensors of Hugging Face: which rows are which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = range | NDArray[np.int64]
# (config.json's keys, rows of the tensor) -> the names of the tensors below the layer and their rows; raises ValueError
# with the expected number of rows
Cut = Callable[[Mapping[str, Any], int], Mapping[str, Rows]]


def cut_attention(config: Mapping[str, Any], num_rows: int) -> Mapping[str, Rows]:
    """Queries, keys and values, one below the other."""
    head_dim = config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    sizes = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    _check_rows(num_rows, sizes)
    bounds = pairwise(accumulate(sizes.values(), initial=0))
    return {name: range(*bound) for name, bound in zip(sizes, bounds, strict=True)}


def cut_rates_and_steps(config: Mapping[str, Any], num_rows: int) -> Mapping[str, Rows]:
    """Rates and steps of a gated delta net: those of a key head's heads side by side."""
    rates, steps = _by_key_heads(config, num_rows, ("rate", "step"))
    return {"linear_attn.in_proj_b": rates, "linear_attn.in_proj_a": steps}


def cut_all_of_key_heads(config: Mapping[str, Any], num_rows: int) -> Mapping[str, Rows]:
    """Queries, keys, values and gates of a gated delta net: those of a key head side by side."""
    queries, keys, values, gates = _by_key_heads(config, num_rows, ("key", "key", "value", "value"))
    return {"linear_attn.in_proj_qkv": np.concatenate([queries, keys, values]), "linear_attn.in_proj_z": gates}


def _by_key_heads(config: Mapping[str, Any], num_rows: int, parts: tuple[str, ...]) -> list[NDArray[np.int64]]:
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
    _check_rows(num_rows, {f"each of {num_keys} key heads": sum(widths)}, num_keys)
    rows = np.arange(num_rows).reshape(num_keys, -1)
    return [part.reshape(-1) for part in np.split(rows, list(accumulate(widths))[:-1], axis=1)]


def _check_rows(num_rows: int, sizes: Mapping[str, int], times: int = 1) -> None:
    """Raise ValueError if the rows are not as many as sizes say, before any are counted out: files say anything."""
    if times * sum(sizes.values()) != num_rows:
        expected = " and ".join(f"{size} of {name}" for name, size in sizes.items())
        raise ValueError(f"has {num_rows} rows, where {expected} are expected")
