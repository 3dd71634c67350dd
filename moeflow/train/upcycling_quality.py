"""Measures an upcycled model and its source on held-out text: perplexities, and the shares of experts."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import cast

import torch

from moeflow.checkpoint.open import open_checkpoint
from moeflow.models.layers.moe import MoE
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.bare_model import ffn_inputs, load_bare_model
from moeflow.train.calibration_text import calibration_text
from moeflow.train.perplexity import perplexity
from moeflow.train.phases import OnDone


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The quality of an upcycled model and its dense source."""

    num_tokens: int  # of the held-out text
    dense_perplexity: float
    moe_perplexity: float
    expert_shares: tuple[tuple[float, ...], ...]  # [layer][expert], of the choices; a layer sums to 1

    @property
    def busiest_shares(self) -> tuple[float, float]:
        """Return the lowest and highest share of a layer's busiest expert, over layers."""
        return min(map(max, self.expert_shares)), max(map(max, self.expert_shares))

    @property
    def idlest_shares(self) -> tuple[float, float]:
        """Return the lowest and highest share of a layer's idlest expert, over layers."""
        return min(map(min, self.expert_shares)), max(map(min, self.expert_shares))


def measure_quality(
    source: Path,
    upcycled: Path,
    *,
    calibration: Path | None = None,
    on_tokens: OnDone = lambda *_: None,
) -> Quality:
    """Measure on the held-out part of the calibration text. on_tokens(done, total) counts both runs.

    Raises: CapacityError if memory does not hold one of the models; CheckpointError; ConfigError.
    """
    texts = calibration_text(Tokenizer.load(source).encode, calibration).held_out
    num_tokens = sum(map(len, texts))
    done = 0

    def count(num_tokens_done: int) -> None:
        nonlocal done
        done += num_tokens_done
        on_tokens(done, 2 * num_tokens)

    with closing(open_checkpoint(source)) as checkpoint:
        dense_perplexity = perplexity(load_bare_model(checkpoint), texts, on_tokens=count)
    with closing(open_checkpoint(upcycled)) as checkpoint:
        model = load_bare_model(checkpoint)
    with ffn_inputs(model.layers) as collected:
        moe_perplexity = perplexity(model, texts, on_tokens=count)
    blocks = [cast(MoE, layer.mlp) for layer in model.layers]
    return Quality(
        num_tokens=num_tokens,
        dense_perplexity=dense_perplexity,
        moe_perplexity=moe_perplexity,
        expert_shares=tuple(map(_expert_shares, blocks, collected, repeat(model.dtype))),
    )


@torch.inference_mode()
def _expert_shares(moe: MoE, inputs: list[torch.Tensor], dtype: torch.dtype) -> tuple[float, ...]:
    """Return each expert's share of the choices. Shapes: inputs [T, H] each."""
    topk_ids, _weights = moe.route(torch.cat(inputs).to(dtype))
    counts = torch.bincount(topk_ids.flatten(), minlength=moe.config.routing.num_experts)
    return tuple((counts / counts.sum()).tolist())
