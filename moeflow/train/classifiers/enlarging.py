"""Enlarges a classifier to more experts (sparse upcycling, 2212.05055, from experts to more of them).

Each expert is copied, with a little noise. A router keeps what it knows, and chooses among the copies of an expert by
clusters of the tokens that the expert gets, so that copies get about as much, and other tokens, from the start. As in
models that were trained so, what a token is decides more than where it stands (2402.01739, section 4.1), and routers
are sure of their choice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from moeflow.core.errors import ConfigError
from moeflow.train.classifiers.labelled_text import LabelledText
from moeflow.train.classifiers.network import Routed, SwitchClassifier
from moeflow.train.router_fitting import fit_router

NOISE: Final = 0.05  # of a copy's weights, in standard deviations of the matrix
KEPT_SPREAD: Final = 12.0  # standard deviation of a token's logits over the old experts, so that it stays with its own
SHARPNESS: Final = 6.0  # standard deviation of a token's logits over the copies of an expert
_TEXTS_TOGETHER: Final = 32
_CLUSTERED_TOKENS: Final = 60_000  # of a layer, at most
_EXPERT = re.compile(r"(.*)\.expert_(\d+)\.(w[io]\.weight)")


def check_enlarging(before: int, after: int) -> None:
    """Raises: ConfigError if experts cannot be copied equally often."""
    if after < before or after % before:
        raise ConfigError(f"experts is {after}; it must be a multiple of the {before} of the classifier to enlarge")


@torch.no_grad()
def enlarge(source: SwitchClassifier, target: SwitchClassifier, text: LabelledText, seed: int) -> None:
    """Give `target`, which has more experts and else the same shape, the weights of `source`.

    `text` is what routers are fitted to. The same arguments give the same result.
    """
    copies = target.shape.num_experts // source.shape.num_experts
    chance = torch.Generator().manual_seed(seed)
    weights = _copied_experts(source.state_dict(), copies, chance)
    if copies > 1:
        sparse = [layer for layer in range(source.shape.num_layers) if source.shape.is_sparse(layer)]
        by_layer, token_ids = _routed(source, text)
        for layer, routed in zip(sparse, by_layer, strict=True):
            prefix = f"encoder.block.{layer}.layer.1.mlp"
            name = f"{prefix}.router.classifier.weight"
            weights[name] = _router(weights[name], routed, token_ids, copies, seed)
            # Probabilities are shared among copies now, so what they weigh is made larger in turn.
            now = (routed.inputs @ weights[name].T).softmax(dim=1).amax(dim=1).mean()
            factor = routed.probabilities.amax(dim=1).mean() / now
            for expert in range(target.shape.num_experts):
                weights[f"{prefix}.experts.expert_{expert}.wo.weight"] *= factor
    target.load_state_dict(weights)


def _copied_experts(weights: Mapping[str, Tensor], copies: int, chance: torch.Generator) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            found[name] = weight.clone()
            continue
        prefix, expert, rest = match[1], int(match[2]), match[3]
        for copy in range(copies):
            noise = torch.randn(weight.shape, generator=chance) * (NOISE * weight.std() if copies > 1 else 0.0)
            found[f"{prefix}.expert_{expert * copies + copy}.{rest}"] = weight + noise
    return found


def _routed(network: SwitchClassifier, text: LabelledText) -> tuple[list[Routed], Tensor]:
    """Return what each router did with the first texts' tokens, and which these are, [T]."""
    network.eval()
    batches: list[list[Routed]] = []
    token_ids: list[Tensor] = []
    for start in range(0, len(text.token_ids), _TEXTS_TOGETHER):
        texts = text.token_ids[start : start + _TEXTS_TOGETHER]
        batches.append(network(texts)[1])
        token_ids += texts
        if sum(map(len, token_ids)) >= _CLUSTERED_TOKENS:
            break
    by_layer = [
        Routed(
            torch.cat([routed.inputs for routed in layer]),
            torch.cat([routed.logits for routed in layer]),
            torch.cat([routed.probabilities for routed in layer]),
            torch.cat([routed.experts for routed in layer]),
        )
        for layer in zip(*batches, strict=True)
    ]
    return by_layer, torch.cat(token_ids)


def _router(rows: Tensor, routed: Routed, token_ids: Tensor, copies: int, seed: int) -> Tensor:
    """Return a router over all copies. Shapes: rows [E, H], token_ids [T] -> [E * copies, H].

    What differs between the experts' tokens in the mean is left to the old rows: copies are told apart by the rest.
    """
    used = [expert for expert in range(len(rows)) if (routed.experts == expert).any()]
    means = torch.stack([routed.inputs[routed.experts == expert].mean(dim=0) for expert in used])
    basis = torch.linalg.qr(means.T).Q
    rest = routed.inputs - routed.inputs @ basis @ basis.T
    spread = routed.logits.std(dim=1, correction=0).mean()
    kept = (KEPT_SPREAD / spread.clamp(min=1e-6)).clamp(min=1.0)
    found = []
    for expert, row in enumerate(rows):
        own = routed.experts == expert if expert in used else torch.ones_like(routed.experts, dtype=torch.bool)
        inputs = _means_of_same(rest[own], token_ids[own])
        found.append(kept * row + SHARPNESS * fit_router(inputs, copies, seed + expert))
    return torch.cat(found)


def _means_of_same(inputs: Tensor, token_ids: Tensor) -> Tensor:
    """Return for each token the mean of its inputs wherever it stands.

    Shapes: inputs [T, H], token_ids [T] -> [T, H].
    """
    different, place = torch.unique(token_ids, return_inverse=True)
    sums = inputs.new_zeros(len(different), inputs.shape[1]).index_add_(0, place, inputs)
    return (sums / torch.bincount(place)[:, None])[place]
