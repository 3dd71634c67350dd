"""Measures an upcycled model and its source on held-out text: perplexities, and the use of experts.

If the experts' order within each layer is drawn at random, a model whose experts differ gets worse. The change of the
perplexity shows how much they differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from moeflow.checkpoint.open import open_checkpoint
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.moe import MoE
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.bare_model import load_bare_model
from moeflow.train.calibration_text import CalibrationText, calibration_text
from moeflow.train.perplexity import WINDOW, perplexity, windows
from moeflow.train.phases import OnDone

_PASSES = 3  # dense, with experts, with permuted experts
Shares = tuple[float, ...]  # of the choices, by expert; the sum is 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TextQuality:
    """The quality on one text."""

    name: str
    num_tokens: int
    dense_perplexity: float
    moe_perplexity: float
    permuted_perplexity: float  # with the experts of each layer in a random order
    expert_shares: Shares  # over all layers
    routing_entropy: float  # of a token's probabilities of experts, the mean over tokens and layers, in nats


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The quality of an upcycled model and its dense source."""

    texts: tuple[TextQuality, ...]
    expert_shares: tuple[Shares, ...]  # of each layer

    @property
    def num_tokens(self) -> int:
        """Tokens of the held-out text."""
        return sum(text.num_tokens for text in self.texts)

    @property
    def dense_perplexity(self) -> float:
        """The source's perplexity over all texts."""
        return self._over_all("dense_perplexity")

    @property
    def moe_perplexity(self) -> float:
        """The perplexity over all texts."""
        return self._over_all("moe_perplexity")

    @property
    def permuted_perplexity(self) -> float:
        """The perplexity over all texts with permuted experts."""
        return self._over_all("permuted_perplexity")

    @property
    def mean_ratio(self) -> float:
        """The geometric mean, over texts, of the perplexity relative to the source's."""
        logs = [math.log(text.moe_perplexity / text.dense_perplexity) for text in self.texts]
        return math.exp(sum(logs) / len(logs))

    @property
    def routing_entropy(self) -> float:
        """The mean over all tokens and layers, in nats."""
        return sum(text.routing_entropy * text.num_tokens for text in self.texts) / self.num_tokens

    @property
    def busiest_shares(self) -> tuple[float, float]:
        """Return the lowest and highest share of a layer's busiest expert, over layers."""
        return min(map(max, self.expert_shares)), max(map(max, self.expert_shares))

    @property
    def idlest_shares(self) -> tuple[float, float]:
        """Return the lowest and highest share of a layer's idlest expert, over layers."""
        return min(map(min, self.expert_shares)), max(map(min, self.expert_shares))

    def _over_all(self, name: str) -> float:
        weights = [num_predicted(text.num_tokens) for text in self.texts]
        logs = [math.log(getattr(text, name)) * weight for text, weight in zip(self.texts, weights, strict=True)]
        return math.exp(sum(logs) / sum(weights))


def measure_quality(
    source: Path,
    upcycled: Path,
    *,
    read_texts: Callable[[Callable[[str], list[int]]], CalibrationText] = calibration_text,
    on_tokens: OnDone = lambda *_: None,
) -> Quality:
    """Measure on the held-out part of texts. on_tokens(done, total) counts all passes.

    `read_texts` gets the tokenizer's `encode`. Raises: CapacityError if memory does not hold one of the models;
    CheckpointError; ConfigError.
    """
    texts = read_texts(Tokenizer.load(source).encode)
    total, done = _PASSES * sum(map(len, texts.held_out)), 0

    def count(num_tokens: int) -> None:
        nonlocal done
        done += num_tokens
        on_tokens(done, total)

    def measured(model: CausalLM) -> list[float]:
        return [perplexity(model, [text], on_tokens=count) for text in texts.held_out]

    dense = measured(_load(source))
    model = _load(upcycled)
    with _watched(model) as use:
        moe = []
        for text in texts.held_out:
            moe.append(perplexity(model, [text], on_tokens=count))
            use.end_text()
    permute_experts(model)
    permuted = measured(model)
    return Quality(
        texts=tuple(
            TextQuality(
                name=name,
                num_tokens=len(token_ids),
                dense_perplexity=dense[number],
                moe_perplexity=moe[number],
                permuted_perplexity=permuted[number],
                expert_shares=_shares(use.counts[number].sum(0)),
                routing_entropy=use.entropies[number],
            )
            for number, (name, token_ids) in enumerate(zip(texts.names, texts.held_out, strict=True))
        ),
        expert_shares=tuple(map(_shares, torch.stack(use.counts).sum(0))),
    )


@torch.inference_mode()
def permute_experts(model: CausalLM, seed: int = 0) -> None:
    """Give each layer's experts a random order, but not its router."""
    generator = torch.Generator().manual_seed(seed)
    for layer in model.layers:
        router = cast(Tensor, _moe(layer.mlp).router)
        router.copy_(router[torch.randperm(len(router), generator=generator)])


def num_predicted(num_tokens: int) -> int:
    """Return the number of tokens of a text that count in its perplexity."""
    return sum(len(window) - 1 for window in windows(range(num_tokens), WINDOW))


class _RoutingUse:
    """Counts choices and entropies of all layers, for one text after another."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.counts: list[Tensor] = []  # [layers, E] of each text
        self.entropies: list[float] = []
        self._empty = torch.zeros(num_layers, num_experts, dtype=torch.int64)
        self._begin()

    def add(self, layer: int, block: MoE, topk_ids: Tensor, hidden: Tensor | None) -> None:
        """Count the choices of tokens in a layer. Shapes: topk_ids [T, K]; hidden [T, H]."""
        assert hidden is not None
        self._counts[layer] += torch.bincount(topk_ids.flatten(), minlength=self._counts.shape[1])
        logprobs = block.router_logits(hidden).float().log_softmax(dim=-1)
        self._entropy -= float((logprobs.exp() * logprobs).sum())
        self._num_choices += len(hidden)

    def end_text(self) -> None:
        """Keep the figures of a text, and begin another."""
        self.counts.append(self._counts)
        self.entropies.append(self._entropy / self._num_choices)
        self._begin()

    def _begin(self) -> None:
        self._counts, self._entropy, self._num_choices = self._empty.clone(), 0.0, 0


@contextmanager
def _watched(model: CausalLM) -> Iterator[_RoutingUse]:
    """Yield counters of the routers' choices inside the block."""
    use = _RoutingUse(len(model.layers), model.config.routing.num_experts)
    blocks = [_moe(layer.mlp) for layer in model.layers]
    for layer, block in enumerate(blocks):
        block.on_route = partial(use.add, layer, block)
    try:
        yield use
    finally:
        for block in blocks:
            block.on_route = None


def _load(path: Path) -> CausalLM:
    with closing(open_checkpoint(path)) as checkpoint:
        return load_bare_model(checkpoint)


def _moe(block: object) -> MoE:
    assert isinstance(block, MoE)
    return block


def _shares(counts: Tensor | Sequence[int]) -> Shares:
    counts = torch.as_tensor(counts)
    return tuple((counts / counts.sum()).tolist())
