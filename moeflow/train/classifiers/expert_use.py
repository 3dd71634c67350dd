"""Measures a classifier's use of its experts: its evenness, and the number of experts of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from moeflow.train.classifiers.labelled_text import LabelledText
from moeflow.train.classifiers.network import SwitchClassifier

_PASS_TEXTS: Final = 32


@dataclass(frozen=True, slots=True)
class ExpertUse:
    """Means over layers with experts."""

    distinct_a_text: float  # experts of a layer that a text uses, on average
    idle_share: float  # of a layer's experts, unused by a text (SiDA, 2310.18859, figure 3)
    used_share: float  # of a layer's experts, used by any text
    evenness: float  # perplexity of the experts' shares of tokens, divided by the number of experts


@torch.no_grad()
def expert_use(network: SwitchClassifier, text: LabelledText) -> ExpertUse:
    """Run all texts and count."""
    network.eval()
    shape = network.shape
    counts = torch.zeros(shape.num_sparse_layers, shape.num_experts)
    distinct = 0
    for start in range(0, len(text.token_ids), _PASS_TEXTS):
        texts = text.token_ids[start : start + _PASS_TEXTS]
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
