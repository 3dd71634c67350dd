"""Recurrent layers in GGUF files: shapes and meaning of their tensors; of Mamba2's metadata and names, too.

llama.cpp stores decays as negative numbers in columns; Hugging Face stores the logarithm of their size. A convolution
has no middle dimension, a norm has a row for each group. A layer without key heads is one without attention.

Source: llama.cpp's conversions of Mamba2 and Granite 4.0, and its defaults for missing keys.
"""

from __future__ import annotations

import math
from typing import Any, Final

from moeflow.core.model_config import ConfigReader
from moeflow.core.truncated_repr import truncated_repr

LAYER_NAMES: Final = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_CONVS: Final = (".ssm_conv1d.weight", ".shortconv.conv.weight")
_DECAY: Final = ".ssm_a"
_VECTORS: Final = (_DECAY, ".ssm_d", ".ssm_norm.weight")


def is_decay(gguf_name: str) -> bool:
    """Return whether a tensor's numbers are decays."""
    return gguf_name.endswith(_DECAY)


def huggingface_shape(gguf_name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that Hugging Face has for what GGUF has in this one."""
    if gguf_name.endswith(_VECTORS):
        return (math.prod(shape),)
    return (shape[0], 1, shape[1]) if gguf_name.endswith(_CONVS) and len(shape) == 2 else shape


def key_heads(reader: ConfigReader, default: int, kinds: tuple[str, str] | None) -> tuple[int, list[str] | None]:
    """Return how many key heads a layer has that attends, and each layer's kind, where the file tells them apart.

    `kinds` are those with and without key heads; None: all layers have some.

    Raises: CheckpointError.
    """
    counts = reader.raw.get("attention.head_count_kv")
    if kinds is None or not isinstance(counts, list):
        return reader.positive("attention.head_count_kv", default), None
    are_counts = all(type(count) is int and count >= 0 for count in counts)
    if len(counts) != reader.positive("block_count") or not are_counts or len({*counts} - {0}) > 1:
        raise reader.error(
            f"'attention.head_count_kv' is {truncated_repr(counts)}, where each layer's number is expected: 0, "
            "or that of others"
        )
    return max(counts) or default, [kinds[0] if count else kinds[1] for count in counts]


def mamba_keys(reader: ConfigReader) -> dict[str, Any]:
    """Return what a config.json says of the layers that do not attend. Raises: CheckpointError."""
    num_values, num_heads = reader.positive("ssm.inner_size"), reader.positive("ssm.time_step_rank")
    hidden_size = reader.positive("embedding_length")
    if num_values % hidden_size or num_values % num_heads:
        raise reader.error(
            f"'ssm.inner_size' is {num_values}, no multiple of the hidden size, {hidden_size}, and of {num_heads} heads"
        )
    return {
        "mamba_expand": num_values // hidden_size,
        "mamba_n_heads": num_heads,
        "mamba_d_head": num_values // num_heads,
        "mamba_n_groups": reader.positive("ssm.group_count"),
        "mamba_d_state": reader.positive("ssm.state_size"),
        "mamba_d_conv": reader.positive("ssm.conv_kernel"),
    }
