"""Writes a Mixtral of any size that takes little disk: its experts are holes in its files, but for a few values.

For what depends on sizes alone, such as moving weights to a GPU: all is read, moved and computed with as in a real
model, and routers, whose inputs are random, choose evenly. A Mixtral 8x7B of 93 GB takes about 3 GB of disk.

    python -m studies.hollow_model mixtral-8x7b FOLDER
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import click
import torch

from moeflow.core.model_config import ModelConfig
from moeflow.models.registry import read_bare_config
from moeflow.planner.model_files import shipped_models
from studies.harness.command import run_study

Shapes = Mapping[str, tuple[int, ...]]
FILLED = 2048  # values at the front of each of an expert's matrices
WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
SEED = 0


def layer_shapes(shape: ModelConfig, layer: int) -> Shapes:
    """Return the tensors of a layer, as Mixtral's checkpoints name them."""
    hidden, width = shape.hidden_size, shape.feed_forward.intermediate_size
    heads, kv_heads = (
        count * shape.attention.head_dim for count in (shape.attention.num_heads, shape.attention.num_kv_heads)
    )
    prefix = f"model.layers.{layer}"
    found = {
        f"{prefix}.self_attn.q_proj.weight": (heads, hidden),
        f"{prefix}.self_attn.k_proj.weight": (kv_heads, hidden),
        f"{prefix}.self_attn.v_proj.weight": (kv_heads, hidden),
        f"{prefix}.self_attn.o_proj.weight": (hidden, heads),
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        f"{prefix}.block_sparse_moe.gate.weight": (shape.routing.num_experts, hidden),
    }
    for expert in range(shape.routing.num_experts):
        name = f"{prefix}.block_sparse_moe.experts.{expert}"
        found |= {f"{name}.w1.weight": (width, hidden), f"{name}.w3.weight": (width, hidden)}
        found |= {f"{name}.w2.weight": (hidden, width)}
    return found


def outer_shapes(shape: ModelConfig) -> Shapes:
    """Return the tensors that belong to no layer."""
    table = (shape.vocab_size, shape.hidden_size)
    return {"model.embed_tokens.weight": table, "model.norm.weight": table[1:], "lm_head.weight": table}


def write_hollow(file: Path, shapes: Shapes, random: torch.Generator) -> None:
    """Write tensors in bfloat16, experts as holes."""
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        begin = stream.tell()
        for name, shape in shapes.items():
            num_values = math.prod(shape)
            count = min(num_values, FILLED) if ".experts." in name else num_values
            values = torch.ones(count) if len(shape) == 1 else torch.randn(count, generator=random) * shape[-1] ** -0.5
            stream.seek(begin)
            stream.write(values.bfloat16().view(torch.uint8).numpy().data)
            begin += 2 * num_values
        stream.truncate(begin)


def write_hollow_mixtral(config_file: Path, folder: Path, narrow: int = 1) -> None:
    """Write a model folder of the shape that a bare `config.json` says, so much narrower. Raises: CheckpointError."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config |= {name: config[name] // narrow for name in WIDTHS}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    shape, random = read_bare_config(folder / "config.json"), torch.Generator().manual_seed(SEED)
    files = {"outer.safetensors": outer_shapes(shape)}
    files |= {f"layer-{layer:03d}.safetensors": layer_shapes(shape, layer) for layer in range(shape.num_layers)}
    for name, shapes in files.items():
        write_hollow(folder / name, shapes, random)
    index = {"weight_map": {tensor: name for name, shapes in files.items() for tensor in shapes}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


@click.command()
@click.argument("shape", type=click.Choice([name for name in shipped_models() if name.startswith("mixtral")]))
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--narrow", default=1, show_default=True, help="Divides widths and heads by so much.")
def main(shape: str, folder: Path, narrow: int = 1) -> None:
    """Write the model."""
    write_hollow_mixtral(shipped_models()[shape], folder, narrow)


if __name__ == "__main__":
    run_study(main)
