"""Gemma 4 in GGUF files: layers with a window have heads and positions of their own.

Positions of the others turn the first pairs of a head alone, which the table of rotary factors says. The last layers
may attend to keys of earlier ones, and have wider networks, as their tensors show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from moeflow.checkpoint.gguf.header import GGUFTensor
from moeflow.checkpoint.gguf.rope import ReadTable, read_factors, scaling_from_metadata, turning_share
from moeflow.core.model_config import ConfigReader
from moeflow.core.truncated_repr import truncated_repr

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
LAYER_NAMES: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp.scale": "moe.router.scale",
    "ffn_down_exps.scale": "moe.router.per_expert_scale",
}


def local_head_keys(reader: ConfigReader, tensors: Mapping[str, GGUFTensor], read_table: ReadTable) -> dict[str, Any]:
    """Return what a config.json says of heads and positions; `tensors` are all that the file has.

    Raises: CheckpointError.
    """
    if scaling_from_metadata(reader) is not None:
        raise reader.error("positions are stretched, which is not supported for this architecture")
    are_local = _of_layers(reader, "attention.sliding_window_pattern", bool)
    counts = (
        _of_layers(reader, "attention.head_count_kv", int)
        if isinstance(reader.raw.get("attention.head_count_kv"), list)
        else [reader.positive("attention.head_count_kv")] * len(are_local)
    )
    local_dim, global_dim = _head_dim(reader, "_swa"), _head_dim(reader, "")
    factors = read_factors(tensors, global_dim, read_table, reader.file)
    num_own = len(are_local) - reader.get(int, "attention.shared_kv_layers", 0)
    are_keys = [
        f"blk.{layer}.attn_v.weight" not in tensors
        for layer, is_local in enumerate(are_local[: max(num_own, 0)])
        if not is_local
    ]
    return _networks(reader, tensors, len(are_local)) | {
        "num_key_value_heads": counts[0],
        "head_dim": local_dim,
        "layer_types": [_LOCAL if is_local else _GLOBAL for is_local in are_local],
        "per_layer_config": {
            str(layer): {"head_dim": local_dim if is_local else global_dim, "num_key_value_heads": count}
            for layer, (is_local, count) in enumerate(zip(are_local, counts, strict=True))
        },
        "attention_k_eq_v": any(are_keys),
        "rope_parameters": {
            _LOCAL: {"rope_type": "default", "rope_theta": reader.get(float, "rope.freq_base_swa", 10000.0)},
            _GLOBAL: {
                "rope_type": "proportional",
                "rope_theta": reader.get(float, "rope.freq_base"),
                "partial_rotary_factor": 1.0 if factors is None else turning_share(factors, reader),
            },
        },
    }


def _networks(reader: ConfigReader, tensors: Mapping[str, GGUFTensor], num_layers: int) -> dict[str, Any]:
    """Return how wide networks are, and how many rows the table of embeddings for each layer has."""
    stated: Any = reader.raw.get("feed_forward_length")
    if isinstance(stated, list):
        widths = _of_layers(reader, "feed_forward_length", int)
        width = ConfigReader({"feed_forward_length": widths[0]}, reader.file).positive("feed_forward_length")
    else:
        width = reader.positive("feed_forward_length")
    last, table = tensors.get(f"blk.{num_layers - 1}.ffn_gate.weight"), tensors.get("per_layer_token_embd.weight")
    found = {"intermediate_size": width, "use_double_wide_mlp": last is not None and last.shape[0] == 2 * width}
    return found if table is None else found | {"vocab_size_per_layer_input": table.shape[0]}


def _of_layers(reader: ConfigReader, key: str, kind: type) -> list[Any]:
    """Return the value of each layer."""
    found, num_layers = reader.raw.get(key), reader.positive("block_count")
    if not isinstance(found, list) or len(found) != num_layers or not all(type(it) is kind for it in found):
        raise reader.error(
            f"{key!r} is {truncated_repr(found)}, where {num_layers} values of {kind.__name__} are expected"
        )
    return found


def _head_dim(reader: ConfigReader, suffix: str) -> int:
    """Return the dimensions of a head; all are rotated."""
    head_dim = reader.positive(f"attention.key_length{suffix}")
    for key in (f"attention.value_length{suffix}", f"rope.dimension_count{suffix}"):
        if reader.positive(key, head_dim) != head_dim:
            raise reader.error(f"{key!r} is {reader.raw[key]}, a head has {head_dim} dimensions: not supported")
    return head_dim
