"""Makes a model of 64 small experts, 8 for a token, from one of 8 large experts, and prints its perplexity.

    python -m studies.fine_experts --out FOLDER

The source is a Mixtral-architecture model, by default the built-in one. Each of its experts is cut into slices of every
eighth inner neuron, as in DeepSeekMoE (arXiv 2401.06066). The slices get the expert's row of the router, with a small
random change. So a token in doubt takes slices of several experts (virtual groups, arXiv 2410.07524). A chosen slice
weighs an eighth in the mean, so its down projection is multiplied by eight. The result is a Mixtral-architecture model,
whose router normalises the weights of the chosen experts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from moeflow.checkpoint.atomic_folder import build_folder
from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.safetensors.writer import weight_bytes, write_json, write_safetensors
from moeflow.core.cache_dir import cache_folder
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.builtin import ensure_builtin_model
from moeflow.train.upcycling_quality import Quality, measure_quality

NUM_SLICES = 8
MIXING = 0.01  # size of the random part of a slice's score, as a share of the spread of the experts' scores
_INNER_ROWS = (".w1.weight", ".w3.weight")  # matrices with one row for each inner neuron
_INNER_COLUMNS = ".w2.weight"
_ROUTER = ".gate.weight"


def write_fine_experts(source: Path, out: Path, *, num_slices: int, mixing: float, overwrite: bool = False) -> None:
    """Write the model with sliced experts. Raises: CheckpointError, ConfigError, CapacityError."""
    with closing(open_checkpoint(source)) as checkpoint:
        config = checkpoint.config
        if config["model_type"] != "mixtral" or config["intermediate_size"] % num_slices:
            raise SystemExit(f"{source} must be a Mixtral whose expert width is a multiple of {num_slices}")
        shapes = dict(_shapes(checkpoint, num_slices))
        with build_folder(out, need_bytes=weight_bytes(shapes), overwrite=overwrite) as folder:
            Tokenizer.load(source).save(folder)
            write_json(folder / "generation_config.json", checkpoint.generation_config)
            sizes = {
                "intermediate_size": config["intermediate_size"] // num_slices,
                "num_local_experts": config["num_local_experts"] * num_slices,
                "num_experts_per_tok": num_slices,
            }
            write_json(folder / "config.json", {**config, **sizes})
            write_safetensors(folder, shapes, _tensors(checkpoint, num_slices, mixing))


def _shapes(checkpoint: Checkpoint, num_slices: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, info in checkpoint.tensors.items():
        first, *rest = info.shape
        if name.endswith(_ROUTER):
            yield name, (first * num_slices, *rest)
        elif name.endswith(_INNER_ROWS):
            yield from ((each, (first // num_slices, *rest)) for each in _slice_names(name, num_slices))
        elif name.endswith(_INNER_COLUMNS):
            yield from ((each, (first, rest[0] // num_slices)) for each in _slice_names(name, num_slices))
        else:
            yield name, info.shape


def _tensors(checkpoint: Checkpoint, num_slices: int, mixing: float) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for name in checkpoint.tensors:
        tensor = checkpoint.read(name)
        if name.endswith(_ROUTER):
            yield name, _sliced_router(tensor.float(), num_slices, mixing, generator).to(torch.bfloat16)
        elif name.endswith(_INNER_ROWS):
            for number, each in enumerate(_slice_names(name, num_slices)):
                yield each, tensor[number::num_slices].to(torch.bfloat16)
        elif name.endswith(_INNER_COLUMNS):
            for number, each in enumerate(_slice_names(name, num_slices)):
                yield each, (tensor[:, number::num_slices].float() * num_slices).to(torch.bfloat16)
        else:
            yield name, tensor.to(torch.bfloat16)


def _sliced_router(router: Tensor, num_slices: int, mixing: float, generator: torch.Generator) -> Tensor:
    """Return rows for all slices. Their change is a mix of the rows' differences, so no slice wins for every token.

    Shapes: router [E, H] -> [E * slices, H].
    """
    rows = router.repeat_interleave(num_slices, dim=0)
    mix = torch.randn(len(rows), len(router), generator=generator) / len(router) ** 0.5
    return rows + mixing * mix @ (router - router.mean(dim=0))


def _slice_names(name: str, num_slices: int) -> list[str]:
    """Return the names of an expert's slices: those of expert 2 are experts 16 to 23."""
    before, expert, matrix, kind = name.rsplit(".", 3)
    return [f"{before}.{int(expert) * num_slices + each}.{matrix}.{kind}" for each in range(num_slices)]


def figures(quality: Quality) -> dict[str, object]:
    """Return the measured figures for JSON."""
    return {
        "tokens": quality.num_tokens,
        "source_perplexity": round(quality.dense_perplexity, 3),
        "perplexity": round(quality.moe_perplexity, 3),
        "permuted_perplexity": round(quality.permuted_perplexity, 3),
        "routing_entropy": round(quality.routing_entropy, 3),
        "busiest_expert_shares": [round(share, 4) for share in quality.busiest_shares],
        "idlest_expert_shares": [round(share, 4) for share in quality.idlest_shares],
        "texts": {
            text.name: [round(text.dense_perplexity, 3), round(text.moe_perplexity, 3)] for text in quality.texts
        },
    }


def main() -> None:
    """Write, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--source", type=Path, help="a Mixtral folder; default: the built-in model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--slices", type=int, default=NUM_SLICES, help="of each expert; a token uses as many experts")
    parser.add_argument("--mixing", type=float, default=MIXING)
    parser.add_argument("--overwrite", action="store_true")
    options = parser.parse_args()
    source = options.source or ensure_builtin_model(cache_folder(None))
    write_fine_experts(
        source, options.out, num_slices=options.slices, mixing=options.mixing, overwrite=options.overwrite
    )
    print(json.dumps({"model": str(options.out), **figures(measure_quality(source, options.out))}, indent=2))


if __name__ == "__main__":
    main()
