"""Texts that a network is asked about, pass by pass, however they come."""

from __future__ import annotations

import torch

from moeflow.core.batch import Batch, BatchEntry
from moeflow.core.request import Request, RequestStatus
from moeflow.core.sampling_params import SamplingParams
from moeflow.experts.prefetch import followed_texts
from moeflow.experts.prefetch.followed_texts import FollowedTexts, NewTokens, ranked_by_layer
from moeflow.experts.prefetch.source import numbered
from moeflow.models.expert_predictor.network import ExpertPredictor, PredictorShape

LAYERS, EXPERTS, TOP_K = 3, 8, 2
TEXTS = (("a", 7), ("b", 18), ("c", 10))
SHAPE = PredictorShape(
    embedding_size=32, num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K, hidden_size=16, window=512
)


class Model:
    """Embeds tokens as itself."""

    def embed(self, token_ids):
        return torch.randn(300, SHAPE.embedding_size, generator=torch.Generator().manual_seed(2))[token_ids]


def followed(predictor):
    return FollowedTexts(predictor, Model().embed)


def experts_of(texts, entries):
    return numbered(ranked_by_layer(texts.wanted([NewTokens.of(each) for each in entries])), EXPERTS)


def entry(request, start, num_tokens):
    return BatchEntry(request, start, num_tokens, (), samples=True)


def expected(predictor, *entries):
    """Return what whole texts say of the tokens of a pass."""
    numbers = set()
    for one in entries:
        logits = predictor(Model().embed(one.request.token_ids(0, one.stop))[None])[0, one.start :]
        chosen = logits.topk(TOP_K).indices + torch.arange(LAYERS)[:, None] * EXPERTS
        numbers |= {*chosen.flatten().tolist()}
    return numbers


def test_texts_are_followed_however_they_come():
    torch.manual_seed(4)
    predictor = ExpertPredictor(SHAPE).requires_grad_(False)
    one = followed(predictor)
    first = Request("a", list(range(2, 40)), SamplingParams(), max_tokens=100)
    second = Request("b", [7, 7, 9], SamplingParams(), max_tokens=100)
    passes = (
        [entry(first, 30, 8), entry(second, 0, 3)],  # the first one's beginning was in a pass too large
        [entry(first, 38, 1), entry(second, 3, 1)],
        [entry(second, 4, 1)],
        [entry(first, 39, 1), entry(second, 5, 2)],
        [entry(first, 36, 4)],  # computed again
        [entry(first, 40, 1), entry(second, 9, 1)],
    )
    for request in (first, second):
        request.output_token_ids.extend([50, 60, 70, 80, 90, 100, 110])
    for entries in passes:
        found = experts_of(one, entries)
        assert {*found} == expected(predictor, *entries)
        assert [number // EXPERTS for number in found] == sorted(number // EXPERTS for number in found)
        assert len(found) == len({*found})
    first.status = RequestStatus.FINISHED
    one.forget_finished()
    assert list(one._followed) == [second]


def test_logits_of_a_pass_come_in_its_order_and_once(monkeypatch):
    torch.manual_seed(4)
    monkeypatch.setattr(followed_texts, "_PIECE_TOKENS", 5)
    predictor = ExpertPredictor(SHAPE).requires_grad_(False)
    one = FollowedTexts(predictor, Model().embed, from_start=True)
    requests = [Request(name, list(range(2, 2 + length)), SamplingParams(), max_tokens=9) for name, length in TEXTS]
    starts = (0, 11, 3)  # of the second text, the beginning comes from the prefix tree
    batch = Batch(tuple(entry(it, at, it.num_tokens - at) for it, at in zip(requests, starts, strict=True)))
    whole = [
        predictor(Model().embed(it.token_ids(0, it.num_tokens))[None])[0, at:]
        for it, at in zip(requests, starts, strict=True)
    ]
    found = one.logits_for(batch)
    torch.testing.assert_close(found, torch.cat(whole))
    monkeypatch.setattr(one, "_network", None)
    assert one.logits_for(batch) is found
    assert one.named_for(batch) is not None


def test_of_a_layer_what_is_likeliest_for_all_tokens_comes_first():
    predictor = ExpertPredictor(SHAPE).requires_grad_(False)
    one = followed(predictor)
    request = Request("a", [3, 4, 5, 6], SamplingParams(), max_tokens=9)
    probabilities = predictor(Model().embed(torch.tensor([[3, 4, 5, 6]])))[0].softmax(-1)
    wanted = {}
    for of_token in probabilities:
        for layer, row in enumerate(of_token):
            for expert in row.topk(TOP_K).indices.tolist():
                number = layer * EXPERTS + expert
                wanted[number] = wanted.get(number, 0.0) + float(row[expert])
    ordered = sorted(wanted, key=lambda number: (number // EXPERTS, -wanted[number]))
    assert experts_of(one, [entry(request, 0, 4)]) == ordered


def test_what_was_not_followed_is_taken_up_no_further_back_than_attention_sees():
    shape = PredictorShape(**{field: getattr(SHAPE, field) for field in SHAPE.__slots__} | {"window": 5})
    predictor = ExpertPredictor(shape).requires_grad_(False)
    request = Request("a", list(range(2, 60)), SamplingParams(), max_tokens=9)
    found = experts_of(followed(predictor), [entry(request, 57, 1)])
    last = Request("b", list(range(55, 60)), SamplingParams(), max_tokens=9)
    assert {*found} == expected(predictor, entry(last, 4, 1))
    rested = followed(predictor)
    experts_of(rested, [entry(request, 0, 2)])
    embedded: list[int] = []
    rested._embed = lambda token_ids: embedded.append(len(token_ids)) or Model().embed(token_ids)
    assert experts_of(rested, [entry(request, 57, 1)]) == found
    assert embedded == [shape.window]


def test_what_an_encoder_sees_comes_before_what_its_decoder_says():
    request = Request("a", [5, 6, 7, *[0] * 13, 0], SamplingParams(), max_tokens=9, num_encoder_tokens=3)
    request.num_together = 17
    request.output_token_ids.extend([40, 50])
    assert NewTokens.of(BatchEntry(request, 0, 16, (), samples=False)) is None
    first = NewTokens.of(BatchEntry(request, 0, 17, (), samples=True))
    assert (first.start, first.stop, first.token_ids(0, first.stop)) == (3, 4, [5, 6, 7, 0])
    later = NewTokens.of(BatchEntry(request, 18, 1, (), samples=True))
    assert (later.start, later.stop) == (5, 6)
    assert later.token_ids(0, 6) == [5, 6, 7, 0, 40, 50][:6]
    assert later.token_ids(1, 5) == [6, 7, 0, 40]
    assert later.token_ids(4, 6) == [40, 50]
