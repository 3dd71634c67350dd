"""Enlarges a classifier to more experts (sparse upcycling, 2212.05055, of experts).

Each expert is copied, with a little noise. The router keeps its rows. Among the copies of an expert it chooses by
clusters of the expert's tokens, so that copies start with equal shares of different tokens. As in fully trained models,
the token decides more than its context (2402.01739, section 4.1), and the probabilities are high.
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
KEPT_SPREAD: Final = 12.0  # standard deviation of a token's logits over the old experts, which keeps its choice
SHARPNESS: Final = 6.0  # standard deviation of a token's logits over the copies of an expert
_PASS_TEXTS: Final = 32
_CLUSTERED_TOKENS: Final = 60_000  # of a layer, at most
_EXPERT = re.compile(r"(.*)\.expert_(\d+)\.(w[io]\.weight)")


def check_enlarging(before: int, after: int) -> None:
    """Raises: ConfigError if not all experts would have the same number of copies."""
    if after < before or after % before:
        raise ConfigError(f"experts is {after}; it must be a multiple of the {before} of the classifier to enlarge")


@torch.no_grad()
def enlarge(source: SwitchClassifier, target: SwitchClassifier, text: LabelledText, seed: int) -> None:
    """Write the weights of `source` into `target`, which has more experts; fit the routers to `text`.

    The same arguments give the same result.
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
            # Copies share the probability of their expert, which scales its output: scale the weights up.
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
    """Return each router's results for the first texts, and their tokens, [T]."""
    network.eval()
    batches: list[list[Routed]] = []
    token_ids: list[Tensor] = []
    for start in range(0, len(text.token_ids), _PASS_TEXTS):
        texts = text.token_ids[start : start + _PASS_TEXTS]
        batches.append(network(texts)[1])
        token_ids += texts
        if sum(map(len, token_ids)) >= _CLUSTERED_TOKENS:
            break
    return list(map(Routed.joined, zip(*batches, strict=True))), torch.cat(token_ids)


def _router(rows: Tensor, routed: Routed, token_ids: Tensor, copies: int, seed: int) -> Tensor:
    """Return a router over all copies. Shapes: rows [E, H], token_ids [T] -> [E * copies, H].

    The old rows see the differences between the experts' mean inputs. The new rows see the rest.
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
    """Return for each token the mean of the inputs of all its occurrences.

    Shapes: inputs [T, H], token_ids [T] -> [T, H].
    """
    different, place = torch.unique(token_ids, return_inverse=True)
    sums = inputs.new_zeros(len(different), inputs.shape[1]).index_add_(0, place, inputs)
    return (sums / torch.bincount(place)[:, None])[place]
