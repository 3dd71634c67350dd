"""Predicts the experts of recorded passes by a model's network, from the recorded texts, as while the model serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from moeflow.checkpoint.identity import checkpoint_identity
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import ConfigError
from moeflow.experts.predict.predictor import MAX_TOKENS
from moeflow.experts.prefetch.followed_texts import FollowedTexts, NewTokens
from moeflow.models.expert_predictor.embeddings import read_embeddings
from moeflow.models.expert_predictor.packed_network import for_serving
from moeflow.models.expert_predictor.saved import load_predictor, predictor_folder
from moeflow.workload.routing_trace import RoutedPass, RoutingTrace

Named = list[list[int]]  # the experts of each layer, likeliest first


def recorded_forecast(model: Path, trace: RoutingTrace, on_pass: Callable[[], None]) -> list[Named | None]:
    """Return the network's prediction for each pass; None for large passes.

    Raises: CheckpointError if the model has no network; ConfigError if the trace is not of this model, or has no text.
    """
    with closing(open_checkpoint(model)) as checkpoint:
        if checkpoint_identity(checkpoint) != trace.header.identity:
            raise ConfigError(f"the trace was recorded with another model than {model}: name that one (--model)")
        network = for_serving(load_predictor(predictor_folder(checkpoint.path), checkpoint))
        rows = read_embeddings(checkpoint)
    if not any(one.texts for one in trace.passes):
        raise ConfigError("the trace has no text, and the network predicts from text. Record it again")
    followed = FollowedTexts(network, lambda token_ids: rows[token_ids].float())
    texts = _Texts()
    found = []
    for one in trace.passes:
        tokens = texts.continue_by(one)
        found.append(followed.named(tokens) if one.ids.shape[1] <= MAX_TOKENS else None)
        on_pass()
    return found


class _Texts:
    """The texts of a trace, as far as the passes so far recorded them."""

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}
        self._beginnings: dict[int, int] = {}  # how many texts each number has stood for

    def continue_by(self, one: RoutedPass) -> Sequence[NewTokens]:
        """Continue the texts of a pass; return the tokens that it computes of each."""
        return [self._continue(part.number, part.known_from, part.start, part.token_ids) for part in one.texts]

    def _continue(self, number: int, known_from: int, start: int, token_ids: Sequence[int]) -> NewTokens:
        text = [*self._texts.get(number, [])[:known_from], *token_ids]
        self._texts[number] = text
        self._beginnings[number] = self._beginnings.get(number, 0) + (known_from == 0)
        return NewTokens((number, self._beginnings[number]), start, len(text), lambda first, stop: text[first:stop])
