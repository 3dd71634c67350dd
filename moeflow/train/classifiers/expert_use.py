"""Measures how a classifier uses its experts: how evenly, and how few of them one text needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from moeflow.train.classifiers.labelled_text import LabelledText
from moeflow.train.classifiers.network import SwitchClassifier

_TEXTS_TOGETHER: Final = 32


@dataclass(frozen=True, slots=True)
class ExpertUse:
    """Means over layers with experts, and over texts where it says so."""

    distinct_a_text: float  # experts of a layer that a text needs
    idle_share: float  # of a layer's experts, those that a text does not need (SiDA, 2310.18859, figure 3)
    used_share: float  # of a layer's experts, those that any text needs
    evenness: float  # perplexity of the experts' shares of tokens, over the number of experts; 1: all get as much


@torch.no_grad()
def expert_use(network: SwitchClassifier, text: LabelledText) -> ExpertUse:
    """Run all texts."""
    network.eval()
    shape = network.shape
    counts = torch.zeros(shape.num_sparse_layers, shape.num_experts)
    distinct = 0
    for start in range(0, len(text.token_ids), _TEXTS_TOGETHER):
        texts = text.token_ids[start : start + _TEXTS_TOGETHER]
        for place, layer in enumerate(network(texts)[1]):
            counts[place] += torch.bincount(layer.experts, minlength=shape.num_experts)
            of_texts = torch.split(layer.experts, list(map(len, texts)))
            distinct += sum(len(torch.unique(experts)) for experts in of_texts)
    mean = distinct / (len(text.token_ids) * shape.num_sparse_layers)
    shares = counts / counts.sum(dim=1, keepdim=True)
    perplexity = torch.special.entr(shares).sum(dim=1).exp()
    return ExpertUse(
        distinct_a_text=mean,
        idle_share=1 - mean / shape.num_experts,
        used_share=float((counts > 0).float().mean()),
        evenness=float((perplexity / shape.num_experts).mean()),
    )
