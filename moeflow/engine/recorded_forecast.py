"""What a model's network says of the passes of a trace: asked about the recorded text, as while the model serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from moeflow.checkpoint.identity import checkpoint_identity
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import ConfigError
from moeflow.engine.followed_texts import FollowedTexts, NewTokens, named_by_layer
from moeflow.experts.predict.predictor import MAX_TOKENS
from moeflow.models.expert_predictor.embeddings import read_embeddings
from moeflow.models.expert_predictor.packed_network import for_serving
from moeflow.models.expert_predictor.saved import load_predictor, predictor_folder
from moeflow.workload.routing_trace import RoutedPass, RoutingTrace

Named = list[list[int]]  # of each layer, likeliest first


def recorded_forecast(model: Path, trace: RoutingTrace, on_pass: Callable[[], None]) -> list[Named | None]:
    """Return what the network names for each pass; None: it would not be asked, as the pass is large.

    Raises: CheckpointError if the model has no network; ConfigError if the trace is not of this model, or has no text.
    """
    with closing(open_checkpoint(model)) as checkpoint:
        if checkpoint_identity(checkpoint) != trace.header.identity:
            raise ConfigError(f"the trace was recorded with another model than {model}: name that one (--model)")
        predictor = for_serving(load_predictor(predictor_folder(checkpoint.path), checkpoint))
        rows = read_embeddings(checkpoint)
    if not any(one.texts for one in trace.passes):
        raise ConfigError("the trace has no text, which the network is asked about. Record it again")
    asked = FollowedTexts(predictor, lambda token_ids: rows[token_ids])
    texts = _Texts()
    found = []
    for one in trace.passes:
        found.append(_named(asked, texts, one))
        on_pass()
    return found


def _named(asked: FollowedTexts, texts: _Texts, one: RoutedPass) -> Named | None:
    tokens = texts.take_up(one)
    if not tokens or one.ids.shape[1] > MAX_TOKENS:
        return None
    return named_by_layer(asked.wanted(tokens))


class _Texts:
    """The texts of a trace, as far as they are known."""

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}
        self._beginnings: dict[int, int] = {}  # how often each number stood for a text that begins

    def take_up(self, one: RoutedPass) -> Sequence[NewTokens]:
        """Take up what a pass tells of texts; return what it computes of them."""
        return [self._take_up(part.number, part.known_from, part.start, part.token_ids) for part in one.texts]

    def _take_up(self, number: int, known_from: int, start: int, token_ids: Sequence[int]) -> NewTokens:
        text = [*self._texts.get(number, [])[:known_from], *token_ids]
        self._texts[number] = text
        self._beginnings[number] = self._beginnings.get(number, 0) + (known_from == 0)
        return NewTokens((number, self._beginnings[number]), start, len(text), lambda first, stop: text[first:stop])
