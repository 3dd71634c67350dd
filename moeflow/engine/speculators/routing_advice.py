"""Which experts the engine's model will need for tokens that a model like it has computed.

The routers of the engine's model are applied to the draft model's hidden states, layer by layer. Both models have
corresponding layers, since one was made from the other. So a token's experts of all layers are known before its pass
begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.moe import MoE
from moeflow.models.layers.norm import Norm
from moeflow.speculation.speculator import Experts

if TYPE_CHECKING:
    from torch import Tensor


class RoutingAdvice:
    """Asks the routers of a model."""

    def __init__(self, model: CausalLM) -> None:
        """Take the model whose experts are to be known."""
        self._routers: list[tuple[int, Norm, MoE]] = [
            (number, layer.post_attention_layernorm, layer.mlp)
            for number, layer in enumerate(model.layers)
            if isinstance(layer.mlp, MoE)
        ]
        self._num_experts = model.config.routing.num_experts

    @staticmethod
    def fits(model: CausalLM, draft: CausalLM) -> bool:
        """Return whether a draft model has layers like the model's: all of them, or the first."""
        is_alike = draft.config.hidden_size == model.config.hidden_size and draft.tells_inputs
        is_part = bool(draft.layers) and draft.layers[0] is model.layers[0]
        return is_alike and (is_part or len(draft.layers) == len(model.layers))

    def experts_of(self, inputs: Tensor, hidden: Tensor) -> list[Experts]:
        """Return what each token will need, over all layers.

        Routers of further layers are applied to the last computed hidden states.

        Shapes: inputs [layers, T, H], what went into each layer's experts or dense network; hidden [T, H], what came
        out of the last layer.
        """
        found: list[set[int]] = [set() for _ in range(hidden.shape[0])]
        for number, (layer, norm, router) in enumerate(self._routers):
            topk_ids, _ = router.route(inputs[layer] if layer < len(inputs) else norm(hidden))
            _add(found, topk_ids.tolist(), number * self._num_experts)
        return [frozenset(experts) for experts in found]


def _add(found: Sequence[set[int]], topk_ids: Sequence[Sequence[int]], first: int) -> None:
    for experts, chosen in zip(found, topk_ids, strict=True):
        experts.update(first + expert for expert in chosen)
