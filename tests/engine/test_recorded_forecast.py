"""Recorded routing, and a network's predictions of it, equal those of a serving model."""

from __future__ import annotations

import shutil
from contextlib import closing

import pytest
import torch

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError, ConfigError
from moeflow.engine import expert_store
from moeflow.engine.engine import Engine
from moeflow.engine.recorded_forecast import recorded_forecast
from moeflow.experts.predict.predictor import MAX_LOOK_AHEAD, MAX_TOKENS
from moeflow.experts.prefetch.followed_texts import FollowedTexts
from moeflow.kernels.cpu import extension
from moeflow.models.expert_predictor.network import ExpertPredictor, PredictorShape
from moeflow.models.expert_predictor.saved import predictor_folder, save_predictor
from moeflow.train.bare_model import load_bare_model
from moeflow.train.predictors.routed_text import router_inputs
from moeflow.workload.routing_trace import read_routing_trace
from tests.engine.streamed_runs import answers, follow_all
from tests.engine.test_streamed_model import streamed_config
from tests.tiny_mixtral import write_tiny_mixtral

LAYERS, EXPERTS, TOP_K = 3, 8, 2
PROMPTS = [list(range(5, 25)), [40, 41], [50, 51, 52]]

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Return a model with a predictor that has learnt nothing."""
    folder = tmp_path_factory.mktemp("model")
    write_tiny_mixtral(folder, num_local_experts=EXPERTS, num_hidden_layers=LAYERS)
    shape = PredictorShape(
        embedding_size=32, num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K, hidden_size=16, window=6
    )
    torch.manual_seed(3)
    with closing(open_checkpoint(folder)) as checkpoint:
        save_predictor(ExpertPredictor(shape), checkpoint, predictor_folder(folder), {})
    return folder


@pytest.fixture
def recorded(target, tmp_path, monkeypatch):
    """Return the trace of a run, and what its network said live, pass by pass."""
    monkeypatch.setattr(expert_store, "probe_read_depth", lambda *_: 2)
    config = streamed_config(
        str(target), tmp_path / "slabs", 9, predictor="sida", dtype="float32", record_routing=tmp_path / "routing"
    )
    engine = Engine.load(config)
    follow_all(engine._runner.experts.prefetch)
    named, live = FollowedTexts.named, []
    with monkeypatch.context() as patched:
        patched.setattr(FollowedTexts, "named", lambda *given: live.append(named(*given)) or live[-1])
        answers(engine, PROMPTS, num_tokens=9)
        answers(engine, [[*PROMPTS[0], 99]], num_tokens=9)  # whose beginning is known
    engine.close()
    return read_routing_trace(tmp_path / "routing"), live


def test_a_network_says_of_a_trace_what_it_said_live(target, recorded):
    trace, live = recorded
    done = []
    named = recorded_forecast(target, trace, lambda: done.append(1))
    assert len(done) == len(trace.passes)
    small = [one is not None for one in named]
    assert small == [one.ids.shape[1] <= MAX_TOKENS for one in trace.passes]
    assert {*small} == {True, False}
    assert [one for one in named if one is not None] == live


def test_routers_ahead_are_those_of_the_next_layers(target, recorded):
    trace, _ = recorded
    with closing(open_checkpoint(target)) as checkpoint:
        model = load_bare_model(checkpoint)
    blocks = [block for _, block in model.moe_blocks()]
    texts, num_checked = {}, 0
    for one in trace.passes:
        assert (one.ahead is None) == (one.ids.shape[1] > MAX_TOKENS)
        row = 0
        for part in one.texts:
            texts[part.number] = [*texts.get(part.number, [])[: part.known_from], *part.token_ids]
            assert part.num_rows == part.stop - part.start
            assert part.stop == len(texts[part.number])
            rows = slice(row, row + part.num_rows)
            row += part.num_rows
            inputs = [of_layer for _, of_layer in router_inputs(model, texts[part.number])]
            for layer, of_layer in enumerate(inputs):
                own = of_layer[part.start : part.stop]
                assert torch.equal(blocks[layer].route(own)[0], torch.tensor(one.ids[layer, rows].tolist()))
                for ahead in range(MAX_LOOK_AHEAD if one.ahead is not None else 0):
                    later = layer + 1 + ahead
                    chosen = torch.tensor(one.ahead[layer, ahead, rows].tolist())
                    expected = blocks[later].route(own)[0] if later < LAYERS else torch.zeros_like(chosen)
                    assert torch.equal(chosen, expected)
                    num_checked += later < LAYERS
        assert row == one.ids.shape[1]
    assert num_checked > 90
    assert any(part.start > part.known_from == 0 for one in trace.passes for part in one.texts)  # a known beginning


def test_what_is_not_of_the_model_is_refused(target, recorded, tmp_path):
    trace, _ = recorded
    other = tmp_path / "other"
    write_tiny_mixtral(other, num_local_experts=EXPERTS, num_hidden_layers=LAYERS, vocab_size=400)
    with pytest.raises(ConfigError, match="another model"):
        recorded_forecast(other, trace, lambda: None)
    bare = shutil.copytree(target, tmp_path / "bare", ignore=shutil.ignore_patterns("predictor"))
    with pytest.raises(CheckpointError, match="moeflow train predictor"):
        recorded_forecast(bare, trace, lambda: None)
