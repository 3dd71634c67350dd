"""Checkpoints of any size that take no space on disk."""

from __future__ import annotations

import json
import math
from pathlib import Path

from moeflow.core.units import MIB
from moeflow.models.registry import read_bare_config
from studies.hollow_model import layer_shapes, outer_shapes


def write_holes(folder: Path, sizes: tuple[int, ...]) -> float:
    """Write a checkpoint whose weights are holes in a file; return the MiB of the weights.

    `sizes`: vocabulary, hidden and expert widths, layers, heads of queries and of keys, experts, top_k.
    """
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    keys += ("num_key_value_heads", "num_local_experts", "num_experts_per_tok")
    config = {"model_type": "mixtral", "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
    config |= dict(zip(keys, sizes, strict=True))
    (folder / "config.json").write_text(json.dumps(config))
    shape = read_bare_config(folder / "config.json")
    shapes = dict(outer_shapes(shape))
    for layer in range(shape.num_layers):
        shapes |= layer_shapes(shape, layer)
    header: dict[str, object] = {}
    end = 0
    for tensor, shape_of in shapes.items():
        begin, end = end, end + 2 * math.prod(shape_of)
        header[tensor] = {"dtype": "BF16", "shape": list(shape_of), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
    return end / MIB
