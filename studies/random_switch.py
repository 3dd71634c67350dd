"""Writes a Switch Transformer of random weights in the shape of a published one, for `engine_vs_transformers.py`.

python -m studies.random_switch FOLDER --experts 8
"""

from __future__ import annotations

from pathlib import Path

import click
import torch
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

from studies.harness.command import run_study


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--experts", default=8, show_default=True, help="Of a layer that has some.")
@click.option("--layers", default=12, show_default=True, help="Of encoder and decoder each; every second has experts.")
@click.option("--seed", default=0, show_default=True)
def main(folder: Path, experts: int, layers: int, seed: int) -> None:
    """Write the model to FOLDER, in float32; layers are those of switch-base."""
    torch.manual_seed(seed)
    config = SwitchTransformersConfig(
        num_layers=layers,
        num_decoder_layers=layers,
        num_sparse_encoder_layers=layers // 2,
        num_sparse_decoder_layers=layers // 2,
        num_experts=experts,
        d_ff=3072,
        expert_capacity=10**6,  # nothing is dropped
        decoder_start_token_id=0,
    )
    SwitchTransformersForConditionalGeneration(config).save_pretrained(folder)
    click.echo(f"{folder}: {experts} experts in {layers} of {2 * layers} layers")


if __name__ == "__main__":
    run_study(main)
