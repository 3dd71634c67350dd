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

    Shapes: experts [N, layers, T] int16, the likeliest first; logits [N, layers, T] float16, of these; is_found [S]
    bool, False for variants with replaced tokens; is_known [N] bool, False for the input of a decoder, which has no
    routing and 0 elsewhere.
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
    kept = []
    for token_ids in sequences:
        on_tokens(len(token_ids))
        kept.append(router_logits(model, token_ids).topk(num_kept, dim=-1))
    return RoutedText(
        token_ids=torch.tensor([token_id for token_ids in sequences for token_id in token_ids]),
        lengths=torch.tensor([len(token_ids) for token_ids in sequences]),
        experts=torch.cat([likeliest.indices.to(torch.int16) for likeliest in kept]),
        logits=torch.cat([likeliest.values.to(torch.float16) for likeliest in kept]),
        is_found=torch.full((len(sequences),), are_found),
        is_known=torch.ones(sum(map(len, sequences)), dtype=torch.bool),
    )


def routed_answers(
    model: EncoderDecoderLM,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    num_kept: int,
    on_tokens: Callable[[int], None],
) -> RoutedText:
    """Run pairs of an input and the decoder's tokens through a model; keep the decoder's routing, as `routed` does.

    Each part has at least one token.
    """
    token_ids: list[int] = []
    experts: list[Tensor] = []
    logits: list[Tensor] = []
    is_known: list[bool] = []
    for given, own in pairs:
        on_tokens(len(own))
        token_ids += [*given, *own]
        likeliest = decoder_router_logits(model, given, own).topk(num_kept, dim=-1)
        for kept, found in ((experts, likeliest.indices.to(torch.int16)), (logits, likeliest.values.to(torch.float16))):
            kept += [found.new_zeros(len(given), *found.shape[1:]), found]
        is_known += [False] * len(given) + [True] * len(own)
    return RoutedText(
        token_ids=torch.tensor(token_ids),
        lengths=torch.tensor([len(given) + len(own) for given, own in pairs]),
        experts=torch.cat(experts),
        logits=torch.cat(logits),
        is_found=torch.ones(len(pairs), dtype=torch.bool),
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
