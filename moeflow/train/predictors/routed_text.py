"""Text with what a model's routers say of each token: what a predictor learns from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeflow.models.language_model import LanguageModel
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.encoder_decoder import EncoderDecoderLM
from moeflow.models.layers.moe import MoE
from moeflow.train.bare_model import HasNetwork, ffn_inputs, run_sequence


@dataclass(frozen=True, slots=True)
class RoutedText:
    """Sequences one after another.

    Shapes: token_ids [N] int64; lengths [S] int64; experts [N, layers, T] int16, the likeliest first, and their
    logits [N, layers, T] float16. Layers are those with experts.
    """

    token_ids: Tensor
    lengths: Tensor
    experts: Tensor
    logits: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """Return all of it by name, to be stored."""
        return {name: getattr(self, name) for name in self.__slots__}


def routed(
    model: LanguageModel, sequences: Sequence[Sequence[int]], num_kept: int, on_tokens: Callable[[int], None]
) -> RoutedText:
    """Run sequences of at least one token through a model; there is at least one. `num_kept` logits of each are kept.

    on_tokens(num_tokens) is called before each sequence. Blocks: for a pass a sequence.
    """
    kept = []
    for token_ids in sequences:
        on_tokens(len(token_ids))
        kept.append(router_logits(model, token_ids).topk(num_kept, dim=-1))
    return RoutedText(
        token_ids=torch.tensor([token_id for token_ids in sequences for token_id in token_ids]),
        lengths=torch.tensor([len(token_ids) for token_ids in sequences]),
        experts=torch.cat([likeliest.indices.to(torch.int16) for likeliest in kept]),
        logits=torch.cat([likeliest.values.to(torch.float16) for likeliest in kept]),
    )


def joined(parts: Sequence[RoutedText]) -> RoutedText:
    """Return several texts as one; there is at least one."""
    columns = zip(*(part.tensors().values() for part in parts), strict=True)
    return RoutedText(*(torch.cat(column) for column in columns))


@torch.inference_mode()
def router_logits(model: LanguageModel, token_ids: Sequence[int]) -> Tensor:
    """Return what all routers say of each token of a sequence; with an encoder, the encoder's routers of an input.

    Shapes: -> [T, layers with experts, E] float32.
    """
    logits = [block.router_logits(inputs) for block, inputs in router_inputs(model, token_ids)]
    return torch.stack(logits, dim=1).float().cpu()


@torch.inference_mode()
def router_inputs(model: LanguageModel, token_ids: Sequence[int]) -> list[tuple[MoE, Tensor]]:
    """Return the same layers, each with what its router gets of a sequence, [T, H]."""
    if isinstance(model, EncoderDecoderLM):
        layers: Sequence[HasNetwork] = model.encoder_layers
        with ffn_inputs(layers, model.dtype) as by_layer:
            model.encode(torch.tensor(token_ids, device=model.device))
        inputs = torch.stack([of_layer for (of_layer,) in by_layer])
    else:
        layers, inputs = model.layers, _decoder_inputs(model, token_ids)
    return [(layer.mlp, of_layer) for layer, of_layer in zip(layers, inputs, strict=True) if isinstance(layer.mlp, MoE)]


def _decoder_inputs(model: CausalLM, token_ids: Sequence[int]) -> Tensor:
    """Return what goes into all networks. Shapes: -> [layers, T, H]."""
    if model.tells_inputs:
        heard: list[Tensor] = []
        run_sequence(model, token_ids, on_inputs=lambda inputs, _: heard.append(inputs))
        (inputs,) = heard
        return inputs
    with ffn_inputs(model.layers, model.dtype) as by_layer:
        run_sequence(model, token_ids)
    return torch.stack([of_layer for (of_layer,) in by_layer])
