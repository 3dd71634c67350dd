"""Makes a Mixture-of-Experts model from a dense one: reads, listens, fits routers, writes.

The arithmetic of experts and files is in `train/upcycled_checkpoint.py`, that of routers in `router_fitting.py`;
here the dense model runs over calibration text, so that each router is fitted on what its layer sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from moeflow.checkpoint.atomic_folder import build_folder
from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.safetensors.writer import weight_bytes
from moeflow.core.errors import ConfigError
from moeflow.core.units import MIB
from moeflow.engine.text.tokenizer import Tokenizer
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.registry import read_model_config
from moeflow.train.bare_model import ffn_inputs, load_bare_model, run_sequence
from moeflow.train.calibration_text import calibration_text
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
    routers: Sequence[torch.Tensor] | None = None,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> None:
    """Make a Mixtral-architecture model in folder `out` from a dense Llama-architecture one.

    Whatever goes wrong, `out` is afterwards what it was before. The same arguments give the same bytes. `routers`, one
    [E, H] a layer, are taken instead of being fitted to calibration text; there is only a phase of writing then.

    Raises: CheckpointError if the source is damaged or of another kind, ConfigError if `out` is taken or the
    calibration text unusable, CapacityError if disk or memory do not suffice.
    """
    report = on_progress or ignore
    if out.resolve() in (source.resolve(), *source.resolve().parents):
        raise ConfigError(f"{out} holds the model to start from, which would be lost. Choose another place")
    with closing(open_checkpoint(source)) as checkpoint:
        check_source(checkpoint)
        shape = read_model_config(checkpoint)
        need_bytes = weight_bytes(mixtral_shapes(checkpoint, shape, recipe)) + _OTHER_FILES_BYTES
        with build_folder(out, need_bytes=need_bytes, overwrite=overwrite) as folder:
            tokenizer = Tokenizer.load(source)
            tokenizer.save(folder)
            if routers is None:
                texts = calibration_text(tokenizer.encode, calibration).fitting
                routers = fit_routers(checkpoint, texts, recipe, report)
            write_mixtral(checkpoint, shape, routers, recipe, folder, on_bytes=partial(report, Phase.WRITING))


def fit_routers(
    checkpoint: Checkpoint, texts: list[list[int]], recipe: UpcycleRecipe, report: OnProgress
) -> list[torch.Tensor]:
    """Return one router a layer, [E, H], fitted to what the dense model's layers see of the texts, token ids each.

    Raises: CapacityError if memory does not hold the model, CheckpointError.
    """
    collected = listen(load_bare_model(checkpoint, partial(report, Phase.READING)), texts, report)
    routers = []
    for layer, inputs in enumerate(collected):
        routers.append(fit_router(torch.cat(inputs), recipe.num_experts, recipe.seed + layer))
        inputs.clear()
        report(Phase.FITTING, layer + 1, len(collected))
    return routers


def listen(model: CausalLM, texts: list[list[int]], report: OnProgress) -> list[list[torch.Tensor]]:
    """Return what each layer's feed-forward block gets, a window at a time, [T, H]."""
    total = sum(map(len, texts))
    done = 0
    with ffn_inputs(model.layers) as collected:
        for token_ids in (window for text in texts for window in windows(text, WINDOW)):
            run_sequence(model, token_ids)
            done += len(token_ids)
            report(Phase.CALIBRATING, done, total)
    return collected
