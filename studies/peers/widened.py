"""The built-in model with rows of 768 in place of 576: as many blocks of 256 as K-quants need, and the same function.

llama.cpp gives matrices whose rows are no multiple of 256 other types than a file's name says. What is added is zero:
columns that nothing reads, heads that say nothing. Norms divide by more columns, which their weights make up for.
"""

from __future__ import annotations

import json
import math
import shutil
from contextlib import closing
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from moeflow.checkpoint.open import open_checkpoint

BLOCK = 256
FOLDER = "widened"


def widen(source: Path, target: Path) -> None:
    """Write a Mixtral-like folder anew, its rows a multiple of `BLOCK`."""
    with closing(open_checkpoint(source)) as checkpoint:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        width, heads, kv_heads = (config[it] for it in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
        head_dim = width // heads
        new_width = -(-width // BLOCK) * BLOCK
        new_kv_heads = new_width // head_dim * kv_heads // heads
        sizes = {width: new_width, kv_heads * head_dim: new_kv_heads * head_dim}
        weights = {name: _padded(name, checkpoint.read(name), sizes, width) for name in checkpoint.tensors}
    target.mkdir(parents=True)
    config |= {
        "hidden_size": new_width,
        "num_attention_heads": new_width // head_dim,
        "num_key_value_heads": new_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": config["rms_norm_eps"] * width / new_width,
    }
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for file in source.glob("*token*.json"):
        shutil.copy(file, target)


def _padded(name: str, values: torch.Tensor, sizes: dict[int, int], width: int) -> torch.Tensor:
    """Return a weight with zeros after its rows and columns; a weight of another size stays as it is."""
    new_width = sizes[width]
    if values.ndim == 1:
        return F.pad(values * math.sqrt(width / new_width), (0, new_width - width)).contiguous()
    rows, columns = values.shape
    is_attention = "_proj" in name
    new_rows = sizes.get(rows, rows) if is_attention or name.endswith("w2.weight") else rows
    return F.pad(values, (0, sizes.get(columns, columns) - columns, 0, new_rows - rows)).contiguous()
