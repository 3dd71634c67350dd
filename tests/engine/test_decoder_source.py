"""A decoder behind an encoder whose experts are predicted: what the network is asked, and that answers stay."""

from __future__ import annotations

import dataclasses
from contextlib import closing

import pytest
import torch

from moeflow.checkpoint.open import open_checkpoint
from moeflow.engine import expert_store
from moeflow.engine.runner_loading import load_runner
from moeflow.experts.predict.predictor import MAX_TOKENS
from moeflow.experts.prefetch.followed_texts import FollowedTexts
from moeflow.experts.prefetch.input_source import InputSource
from moeflow.experts.prefetch.network_source import NetworkSource
from moeflow.kernels.cpu import extension
from moeflow.models.expert_predictor.network import ExpertPredictor, PredictorShape
from moeflow.models.expert_predictor.saved import folders_of, save_predictor
from tests.engine.streamed_runs import follow_all
from tests.engine.test_encoder_decoder import config_of, run
from tests.engine.test_streamed_model import streamed_config
from tests.tiny_switch import write_tiny_switch

EXPERTS, OF_ENCODER, OF_DECODER = 8, 2, 1
SIZES = {"embedding_size": 32, "num_experts": EXPERTS, "top_k": 1, "hidden_size": 16, "window": 64}

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Return a model with predictors that have learnt nothing."""
    folder = tmp_path_factory.mktemp("target")
    write_tiny_switch(folder, num_experts=EXPERTS)
    torch.manual_seed(3)
    shapes = (
        PredictorShape(num_layers=OF_ENCODER, is_causal=False, **SIZES),
        PredictorShape(num_layers=OF_DECODER, **SIZES),
    )
    with closing(open_checkpoint(folder)) as checkpoint:
        for shape, place in zip(shapes, folders_of(folder), strict=True):
            save_predictor(ExpertPredictor(shape), checkpoint, place, {})
    return folder


@pytest.fixture
def stores(monkeypatch):
    """Have all predictions be followed; return the stores of engines that are loaded."""
    monkeypatch.setattr(expert_store, "probe_read_depth", lambda *_: 2)
    found = []
    prefetch_by = expert_store.ExpertStore.prefetch_by

    def always_on(self, sources):
        prefetch_by(self, sources)
        follow_all(self.prefetch)
        found.append(self)

    monkeypatch.setattr(expert_store.ExpertStore, "prefetch_by", always_on)
    return found


def streamed(folder, slabs, num_slots, **settings):
    experts = streamed_config(str(folder), slabs, num_slots, predictor="sida").experts
    return dataclasses.replace(config_of(folder, **settings), experts=experts)


@pytest.mark.parametrize("num_slots", [3, 9, 24])
def test_answers_are_the_same_whatever_is_predicted(target, tmp_path, stores, monkeypatch, num_slots):
    asked, ranked = [], []
    rank_pass, followed = NetworkSource.rank_pass, FollowedTexts.wanted
    monkeypatch.setattr(NetworkSource, "rank_pass", lambda *given: ranked.append(rank_pass(*given)) or ranked[-1])
    monkeypatch.setattr(
        FollowedTexts,
        "wanted",
        lambda self, tokens: asked.extend((it, it.token_ids(0, it.stop)) for it in tokens) or followed(self, tokens),
    )
    assert (
        run(streamed(target, tmp_path / "slabs", num_slots, max_num_seqs=4))[0]
        == run(config_of(target, max_num_seqs=4))[0]
    )
    (store,) = stores
    assert [type(it) for it in store.prefetch.sources] == [InputSource, NetworkSource]
    store.cache.check_integrity()
    first = OF_ENCODER * EXPERTS
    assert all(first <= number < first + OF_DECODER * EXPERTS for numbers in ranked for number in numbers)
    assert any(ranked)
    for tokens, text in asked:
        request, num_input = tokens.text, tokens.text.num_encoder_tokens
        own = [request.prompt_token_ids[-1], *request.output_token_ids]
        assert text[:num_input] == request.prompt_token_ids[:num_input]
        assert text[num_input:] == own[: len(text) - num_input]
        assert (tokens.stop, tokens.stop - tokens.start <= MAX_TOKENS) == (len(text), True)
    longest = max((len(text) - tokens.text.num_encoder_tokens for tokens, text in asked), default=0)
    assert longest > 3


def test_without_a_predictor_of_the_decoder_there_is_that_of_inputs(target, tmp_path, stores):
    folder = tmp_path / "model"
    write_tiny_switch(folder, num_experts=EXPERTS)
    shape = PredictorShape(num_layers=OF_ENCODER, is_causal=False, **SIZES)
    with closing(open_checkpoint(folder)) as checkpoint:
        save_predictor(ExpertPredictor(shape), checkpoint, folders_of(folder)[0], {})
    with closing(load_runner(streamed(folder, tmp_path / "slabs", 9))):
        (store,) = stores
        assert [type(it) for it in store.prefetch.sources] == [InputSource]
