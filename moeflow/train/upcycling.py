"""Upcycles a dense model: runs it over calibration text, fits a router to each layer's inputs, writes experts.

`upcycled_checkpoint.py` makes experts and files, `router_fitting.py` makes routers.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from moeflow.checkpoint.atomic_folder import build_folder
from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.safetensors.writer import weight_bytes
from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.core.units import MIB
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.registry import read_model_config
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.bare_model import ffn_inputs, load_bare_model, run_sequence
from moeflow.train.calibration_text import calibration_text
from moeflow.train.experts.saved import TrainedExperts
from moeflow.train.perplexity import WINDOW, windows
from moeflow.train.phases import OnProgress, Phase, ignore
from moeflow.train.router_fitting import fit_router
from moeflow.train.upcycle_recipe import UpcycleRecipe
from moeflow.train.upcycled_checkpoint import check_source, mixtral_shapes, write_mixtral

_OTHER_FILES_BYTES = 16 * MIB  # tokenizer and configs


def upcycle(
    source: Path,
    out: Path,
    recipe: UpcycleRecipe,
    *,
    calibration: Path | None = None,
    trained: TrainedExperts | None = None,
    overwrite: bool = False,
    on_progress: OnProgress = ignore,
) -> None:
    """Make a Mixtral-architecture model in folder `out` from a dense Llama-architecture one.

    An error leaves `out` unchanged. The same arguments give the same bytes. With `trained` experts, nothing is fitted,
    and the only phase is writing.

    Raises: CheckpointError if the source is damaged or of another kind; ConfigError if `out` exists or the calibration
    text is unusable; CapacityError if disk or memory are too small.
    """
    check_out(source, out)
    with closing(open_checkpoint(source)) as checkpoint:
        check_source(checkpoint)
        shape = read_model_config(checkpoint)
        need_bytes = space_needed(checkpoint, shape, recipe)
        with build_folder(out, need_bytes=need_bytes, overwrite=overwrite) as folder:
            tokenizer = Tokenizer.load(source)
            tokenizer.save(folder)
            routers, make_expert = (None, None) if trained is None else (trained.routers, trained.adapters.changed)
            if routers is None:
                texts = calibration_text(tokenizer.encode, calibration).fitting
                routers = fit_routers(checkpoint, texts, recipe, on_progress)
            report = partial(on_progress, Phase.WRITING)
            write_mixtral(checkpoint, shape, routers, recipe, folder, make_expert=make_expert, on_bytes=report)


def check_out(source: Path, out: Path) -> None:
    """Raises: ConfigError if the result would replace its source."""
    if out.resolve() in (source.resolve(), *source.resolve().parents):
        raise ConfigError(f"{out} holds the source model and would replace it. Choose another folder (--out)")


def space_needed(checkpoint: Checkpoint, shape: ModelConfig, recipe: UpcycleRecipe) -> int:
    """Return the bytes of the result. Raises: CheckpointError if the source lacks a tensor."""
    return weight_bytes(mixtral_shapes(checkpoint, shape, recipe)) + _OTHER_FILES_BYTES


def fit_routers(
    checkpoint: Checkpoint, texts: list[list[int]], recipe: UpcycleRecipe, report: OnProgress
) -> list[torch.Tensor]:
    """Return one router per layer, [E, H], fitted to the layer's inputs for texts of token ids.

    Raises: CapacityError if memory does not hold the model; CheckpointError.
    """
    collected = listen(load_bare_model(checkpoint, partial(report, Phase.READING)), texts, report)
    routers = []
    for layer, inputs in enumerate(collected):
        routers.append(fit_router(torch.cat(inputs), recipe.num_experts, recipe.seed + layer))
        inputs.clear()
        report(Phase.FITTING, layer + 1, len(collected))
    return routers


def listen(model: CausalLM, texts: list[list[int]], report: OnProgress) -> list[list[torch.Tensor]]:
    """Return the inputs of each layer's feed-forward block, [T, H] for each window."""
    total = sum(map(len, texts))
    done = 0
    with ffn_inputs(model.layers) as collected:
        for token_ids in (window for text in texts for window in windows(text, WINDOW)):
            run_sequence(model, token_ids)
            done += len(token_ids)
            report(Phase.CALIBRATING, done, total)
    return collected
