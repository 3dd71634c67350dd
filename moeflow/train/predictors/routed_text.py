"""Text with the routing of each token: the material a predictor learns from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeflow.models.language_model import LanguageModel
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.encoder_decoder import EncoderDecoderLM
from moeflow.models.layers.moe import MoE
from moeflow.train.bare_model import HasNetwork, ffn_inputs, run_input, run_sequence
from moeflow.train.text_rounds import TextColumns


@dataclass(frozen=True, slots=True)
class RoutedText(TextColumns):
    """Sequences with the most likely experts of each token. Layers are those with experts.

    Shapes: experts [N, layers, T] int16, the likeliest first; logits [N, layers, T] float16, of these. is_found [S]
    bool, False for variants with replaced tokens. is_known [N] bool, False for a decoder's input, which has no routing
    and 0 elsewhere.
    """

    experts: Tensor
    logits: Tensor
    is_found: Tensor
    is_known: Tensor

    def known_experts(self, sequences: Sequence[slice]) -> Tensor:
        """Return the experts of the known tokens of sequences: [N, layers, T] int64."""
        return torch.cat([self.experts[where][self.is_known[where]] for where in sequences]).long()

    def known_logits(self, sequences: Sequence[slice]) -> Tensor:
        """Return their logits: [N, layers, T] float16."""
        return torch.cat([self.logits[where][self.is_known[where]] for where in sequences])


def routed(
    model: LanguageModel,
    sequences: Sequence[Sequence[int]],
    num_kept: int,
    on_tokens: Callable[[int], None],
    *,
    are_found: bool = True,
) -> RoutedText:
    """Run at least one sequence of at least one token through a model; keep the `num_kept` highest logits.

    on_tokens(num_tokens) is called before each sequence. Blocks: for one pass per sequence.
    """
    pairs = [((), token_ids) for token_ids in sequences]
    return _kept(pairs, lambda _, own: router_logits(model, own), num_kept, on_tokens, are_found=are_found)


def routed_answers(
    model: EncoderDecoderLM,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    num_kept: int,
    on_tokens: Callable[[int], None],
) -> RoutedText:
    """Run pairs of an input and the decoder's tokens through a model; keep the decoder's routing, as `routed` does.

    Each part has at least one token.
    """
    return _kept(pairs, lambda given, own: decoder_router_logits(model, given, own), num_kept, on_tokens)


def _kept(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    logits_of: Callable[[Sequence[int], Sequence[int]], Tensor],
    num_kept: int,
    on_tokens: Callable[[int], None],
    *,
    are_found: bool = True,
) -> RoutedText:
    token_ids: list[int] = []
    columns: tuple[list[Tensor], list[Tensor]] = ([], [])
    is_known: list[bool] = []
    for given, own in pairs:
        on_tokens(len(own))
        token_ids += [*given, *own]
        is_known += [False] * len(given) + [True] * len(own)
        likeliest = logits_of(given, own).topk(num_kept, dim=-1)
        found = (likeliest.indices.to(torch.int16), likeliest.values.to(torch.float16))
        for column, tensor in zip(columns, found, strict=True):
            column += [tensor.new_zeros(len(given), *tensor.shape[1:]), tensor]
    return RoutedText(
        token_ids=torch.tensor(token_ids),
        lengths=torch.tensor([len(given) + len(own) for given, own in pairs]),
        experts=torch.cat(columns[0]),
        logits=torch.cat(columns[1]),
        is_found=torch.full((len(pairs),), are_found),
        is_known=torch.tensor(is_known),
    )


@torch.inference_mode()
def router_logits(model: LanguageModel, token_ids: Sequence[int]) -> Tensor:
    """Return the logits of all routers for each token; of an encoder-decoder, the encoder's for an input.

    Shapes: -> [T, layers with experts, E] float32.
    """
    logits = [block.router_logits(inputs) for block, inputs in router_inputs(model, token_ids)]
    return torch.stack(logits, dim=1).float().cpu()


@torch.inference_mode()
def decoder_router_logits(model: EncoderDecoderLM, given: Sequence[int], own: Sequence[int]) -> Tensor:
    """Return the logits of the decoder's routers for its own tokens.

    Shapes: -> [T, layers of the decoder with experts, E] float32.
    """
    with ffn_inputs(model.decoder_layers, model.dtype) as by_layer:
        run_input(model, given, own)
    logits = [
        layer.mlp.router_logits(inputs)
        for layer, (inputs,) in zip(model.decoder_layers, by_layer, strict=True)
        if isinstance(layer.mlp, MoE)
    ]
    return torch.stack(logits, dim=1).float().cpu()


@torch.inference_mode()
def router_inputs(model: LanguageModel, token_ids: Sequence[int]) -> list[tuple[MoE, Tensor]]:
    """Return the same layers, each with its router's input, [T, H]."""
    if isinstance(model, EncoderDecoderLM):
        layers: Sequence[HasNetwork] = model.encoder_layers
        with ffn_inputs(layers, model.dtype) as by_layer:
            model.encode(torch.tensor(token_ids, device=model.device))
        inputs = torch.stack([of_layer for (of_layer,) in by_layer])
    else:
        layers, inputs = model.layers, _decoder_inputs(model, token_ids)
    return [(layer.mlp, of_layer) for layer, of_layer in zip(layers, inputs, strict=True) if isinstance(layer.mlp, MoE)]


def _decoder_inputs(model: CausalLM, token_ids: Sequence[int]) -> Tensor:
    """Return the inputs of all feed-forward blocks. Shapes: -> [layers, T, H]."""
    if model.tells_inputs:
        heard: list[Tensor] = []
        run_sequence(model, token_ids, on_inputs=lambda inputs, _: heard.append(inputs))
        (inputs,) = heard
        return inputs
    with ffn_inputs(model.layers, model.dtype) as by_layer:
        run_sequence(model, token_ids)
    return torch.stack([of_layer for (of_layer,) in by_layer])
