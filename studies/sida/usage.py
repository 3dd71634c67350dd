"""What texts use of a classifier's experts, and what a trained network knows of it beforehand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moeflow.kernels.cpu import extension
from moeflow.models.expert_predictor.network import ExpertPredictor
from moeflow.models.layers.encoder_decoder import EncoderDecoderLM
from moeflow.train.predictors.hit_rates import are_drafted
from moeflow.train.predictors.routed_text import router_inputs

_GUESSES = (1, 3)  # of which one has to be right


@dataclass(slots=True)
class Usage:
    """Of each text: its tokens, and how many experts of all layers it needs; and sums over all texts.

    `hits`: choices that are among the first so many drafts. Layers are the encoder's with experts.
    """

    num_tokens: list[int] = field(default_factory=list)
    used_experts: list[int] = field(default_factory=list)
    routing_s: float = 0.0  # in routers and the choice of experts
    predicting_s: float = 0.0  # in the network
    num_choices: int = 0
    hits: dict[int, int] = field(default_factory=lambda: dict.fromkeys(_GUESSES, 0))

    def hit_rates(self) -> dict[str, float]:
        """Return the share of choices that were drafted: {"1": .., "3": ..}."""
        return {str(drafts): number / self.num_choices for drafts, number in self.hits.items()}


def usage_of(
    model: EncoderDecoderLM,
    predictor: ExpertPredictor | None,
    texts: Sequence[list[int]],
    on_text: Callable[[], None],
    budget_s: float,
) -> Usage:
    """Encode texts one by one, with the model's own routers, as many as the time allows. Blocks."""
    found, began_s = Usage(), time.perf_counter()
    with ThreadPoolExecutor(1, initializer=_compute_alone) as lane:
        for text in texts:
            chosen = _chosen(model, text, found)
            found.num_tokens.append(len(text))
            found.used_experts.append(sum(len(torch.unique(of_layer)) for of_layer in chosen.unbind(1)))
            if predictor is not None:
                embeddings = model.embed(torch.tensor(text)).float()
                lane.submit(_count_hits, predictor, embeddings, chosen, found).result()
            on_text()
            if time.perf_counter() - began_s > budget_s:
                break
    return found


def _compute_alone() -> None:
    """Have the network's thread be as in a server, where it computes beside passes."""
    if extension.is_available():
        extension.use_own_threads(1)


@torch.inference_mode()
def _chosen(model: EncoderDecoderLM, text: list[int], found: Usage) -> Tensor:
    """Return the experts that routers choose, [T, layers]."""
    choices = []
    for block, inputs in router_inputs(model, text):
        began_s = time.perf_counter()
        topk_ids, _ = block.route(inputs)
        found.routing_s += time.perf_counter() - began_s
        choices.append(topk_ids[:, 0])
    return torch.stack(choices, dim=1)


@torch.inference_mode()
def _count_hits(predictor: ExpertPredictor, embeddings: Tensor, chosen: Tensor, found: Usage) -> None:
    """Add what the network says of a text. Shapes: embeddings [T, H], chosen [T, layers]."""
    began_s = time.perf_counter()
    drafts = predictor(embeddings[None])[0].topk(min(max(_GUESSES), predictor.shape.num_experts), dim=-1).indices
    found.predicting_s += time.perf_counter() - began_s
    found.num_choices += chosen.numel()
    for number in _GUESSES:
        found.hits[number] += int(are_drafted(chosen[..., None], drafts[..., :number]).sum())
