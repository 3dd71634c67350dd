"""A network that predicts a pass's experts: its inputs, the saved reads, and unchanged answers."""

from __future__ import annotations

import shutil
from contextlib import closing
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.batch import Batch, BatchEntry
from moeflow.core.engine_messages import TrialStats
from moeflow.core.errors import CapacityError, CheckpointError
from moeflow.core.request import Request
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.trial import Trial
from moeflow.engine import expert_store
from moeflow.engine.engine import Engine
from moeflow.experts.predict.predictor import MAX_TOKENS
from moeflow.experts.prefetch.driver import PrefetchDriver
from moeflow.experts.prefetch.followed_texts import FollowedTexts
from moeflow.experts.prefetch.network_source import NetworkSource
from moeflow.kernels.cpu import extension
from moeflow.models.expert_predictor.network import ExpertPredictor, PredictorShape
from moeflow.models.expert_predictor.saved import carry_predictor, predictor_folder, save_predictor
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from moeflow.train.bare_model import load_bare_model
from moeflow.train.predictors.distillation import PredictorRecipe, train_predictor
from moeflow.train.predictors.routed_text import router_logits
from tests.engine.speculators.test_draft_model import timeless
from tests.engine.streamed_runs import answers, follow_all, run
from tests.engine.test_streamed_model import streamed_config
from tests.tiny_mixtral import write_tiny_mixtral

LAYERS, EXPERTS, TOP_K = 3, 8, 2
SHAPE = PredictorShape(
    embedding_size=32, num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K, hidden_size=16, window=512
)

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bare")
    write_tiny_mixtral(folder, num_local_experts=EXPERTS, num_hidden_layers=LAYERS)
    return folder


@pytest.fixture(scope="module")
def target(bare, tmp_path_factory):
    """Return a model with a predictor that has learnt nothing."""
    folder = shutil.copytree(bare, tmp_path_factory.mktemp("target") / "model")
    torch.manual_seed(3)
    with closing(open_checkpoint(folder)) as checkpoint:
        save_predictor(ExpertPredictor(SHAPE), checkpoint, predictor_folder(folder), {})
    return folder


@pytest.fixture(scope="module")
def slabs(tmp_path_factory):
    return tmp_path_factory.mktemp("slabs") / "slabs"


@pytest.fixture(autouse=True)
def quick_probe(monkeypatch):
    monkeypatch.setattr(expert_store, "probe_read_depth", lambda *_: 2)


def load(model, slabs, *, num_slots: int = 9, is_on: bool = True, **settings) -> Engine:
    """Return an engine that follows all predictions, or none."""
    engine = Engine.load(streamed_config(str(model), slabs, num_slots, predictor="sida", dtype="float32", **settings))
    follow_all(engine._runner.experts.prefetch, is_on=is_on)
    return engine


@pytest.mark.parametrize("num_slots", [3, 9, 24])
def test_tokens_are_the_same_whatever_is_predicted(target, slabs, num_slots):
    plain = run(streamed_config(str(target), slabs, num_slots, dtype="float32"))
    for speculators in ((), ("suffix",), ("self:int8",)):
        engine = load(target, slabs, num_slots=num_slots, speculators=speculators)
        assert answers(engine) == (plain, {})
        cache = engine._runner.experts.cache
        cache.check_integrity()
        assert cache.stats().prefetched_bytes > 0 or num_slots == 24
        engine.close()


def test_a_network_that_was_packed_with_the_weights_is_found(target, bare, tmp_path):
    slabs = tmp_path / "slabs"
    with closing(open_checkpoint(target)) as checkpoint:
        carry_predictor(checkpoint, slabs)
    engine = load(bare, slabs)
    assert answers(engine) == (run(streamed_config(str(bare), slabs, 9, dtype="float32")), {})
    assert engine._runner.experts.cache.stats().prefetched_bytes > 0
    engine.close()


def awaited(store) -> None:
    """Have a pass begin once all that was predicted is there."""
    prefetch_pass = store.cache.prefetch_pass

    def prefetch_and_wait(numbers):
        prefetch_pass(numbers)
        with store.cache._changed:
            while store.cache._states.loads:
                store.cache._loads.wait_for_load()

    store.cache.prefetch_pass = prefetch_and_wait


def test_right_predictions_leave_less_to_wait_for(target, slabs, monkeypatch):
    with closing(open_checkpoint(target)) as checkpoint:
        model = load_bare_model(checkpoint)

    def oracle(self, tokens):
        return torch.cat([router_logits(model, one.token_ids(0, one.stop))[one.start :] for one in tokens])

    monkeypatch.setattr(FollowedTexts, "_logits", oracle)

    def lacked_and_used(is_on: bool) -> tuple[int, int]:
        engine = load(target, slabs, num_slots=14, is_on=is_on)
        store = engine._runner.experts
        awaited(store)
        answers(engine, [[60, 71, 82, 93, 44]], num_tokens=60)
        stats = store.stats()
        engine.close()
        return stats.expert_misses_total + stats.expert_late_total, stats.expert_used_bytes_total

    (lacked, used), (lacked_before, used_before) = lacked_and_used(is_on=True), lacked_and_used(is_on=False)
    assert lacked < 0.5 * lacked_before
    assert used > 5 * used_before


def test_what_was_trained_is_taken_and_hits(bare, slabs, tmp_path):
    model = shutil.copytree(bare, tmp_path / "model")
    data = tmp_path / "text.txt"
    data.write_bytes(bytes(torch.randint(32, 127, (20000,), generator=torch.Generator().manual_seed(0)).tolist()))
    recipe = PredictorRecipe(text_tokens=4000, epochs=16, learning_rate=1e-2, batch_size=8, hidden_size=32)
    settings = Settings(model=str(model), num_threads=1, kv_cache_bytes=2**20, dtype="float32")
    rates = train_predictor(settings, recipe, data=data).hit_rates.mean()
    assert rates["top_k"] > 1.3 * rates["most_used"]
    engine = load(model, slabs)
    awaited(engine._runner.experts)
    assert answers(engine) == (run(streamed_config(str(model), slabs, 9, dtype="float32")), {})
    assert engine.stats().expert_used_bytes_total > 0
    engine.close()


def test_it_rests_where_it_does_not_pay_and_in_passes_of_many_tokens(target, slabs, monkeypatch):
    engine = load(target, slabs, is_on=False)
    (source,) = engine._runner.experts.prefetch.sources
    asked, told = [], []
    wanted = torch.zeros(LAYERS, EXPERTS)
    monkeypatch.setattr(FollowedTexts, "wanted", lambda _, tokens: asked.append(tokens) or wanted)
    monkeypatch.setattr(source.trial, "end_pass", lambda num_tokens, *_: told.append(num_tokens))
    answers(engine, [list(range(2, 2 + MAX_TOKENS + 1))], num_tokens=6)
    assert asked == []  # off
    assert told
    assert {*told} == {1}  # that it may be tried again, but for the prompt
    source.trial.is_on = True
    answers(engine, [list(range(100, 101 + MAX_TOKENS))], num_tokens=6)
    assert len(asked) == 5
    engine.close()


def test_where_drafts_say_what_is_needed_nothing_is_predicted(target, slabs, monkeypatch):
    engine = load(target, slabs, speculators=("self:int8",))
    timeless(engine)
    store = engine._runner.experts
    wanted, begin_pass = FollowedTexts.wanted, store.begin_pass
    is_said: list[bool] = []
    has_predicted: list[bool] = []

    def begin(batch):
        is_said.append(store.prefetch.has_drafts or batch.num_tokens > MAX_TOKENS)
        has_predicted.append(False)
        begin_pass(batch)

    def predict(self, tokens):
        has_predicted[-1] = True
        return wanted(self, tokens)

    monkeypatch.setattr(store, "begin_pass", begin)
    monkeypatch.setattr(FollowedTexts, "wanted", predict)
    answers(engine, [[5, 9, 200, 31, 7]], num_tokens=40)
    assert any(is_said)
    assert has_predicted == [not said for said in is_said]
    assert any(has_predicted)
    engine.close()


@pytest.mark.parametrize("failing", ["_keeper.make_room", "_experts.cache.begin_pass", "_lossy.begin_pass"])
def test_a_pass_that_cannot_begin_leaves_no_drafts_to_the_next_pass(target, slabs, failing):
    """Otherwise the next pass belongs to these drafts, and their trial counts the time since they were made."""
    engine = load(target, slabs, speculators=("self:int8",))
    timeless(engine)
    runner, store = engine._runner, engine._runner.experts
    runner._keeper = SimpleNamespace(make_room=lambda _: None, settle=lambda _: None)
    runner._lossy = SimpleNamespace(begin_pass=lambda _: None, expect=lambda _: None, close=lambda: None)
    names = failing.split(".")
    part = attrgetter(".".join(names[:-1]))(runner)
    begin, had_drafts = getattr(part, names[-1]), []

    def fail_with_drafts(*arguments):
        if store.prefetch.has_drafts:
            had_drafts.append(True)
            raise CapacityError("no room")
        begin(*arguments)

    setattr(part, names[-1], fail_with_drafts)
    _, errors = answers(engine, [[5, 9, 200, 31, 7]], num_tokens=40)
    assert had_drafts == [True]
    assert "no room" in errors["0"]
    assert not store.prefetch.has_drafts
    engine.close()


def test_what_is_switched_off_is_said(target, slabs):
    engine = load(target, slabs)
    (source,) = engine._runner.experts.prefetch.sources
    for _ in range(200):
        Trial.end_pass(source.trial, 1, 2.0 if source.trial.is_on else 1.0)
    found = engine.stats().trials[0]
    assert found == TrialStats(name="prefetching by sida", reason="passes take 100% more time with it")
    engine.close()


def test_failed_and_large_passes_are_not_judged():
    class Cache:
        has_absent, stall_s = True, 0.0

    def refuse(*_):
        raise AssertionError("asked")

    trial = Trial("sida")
    trial.end_pass = refuse
    one = PrefetchDriver(Cache(), [NetworkSource(trial, EXPERTS, refuse)])
    many = Request("a", list(range(2, 50)), SamplingParams(), max_tokens=9)
    one.begin_pass(Batch((BatchEntry(many, 0, MAX_TOKENS + 1, (), samples=True),)))
    one.end_pass(MAX_TOKENS + 1)
    one.begin_pass(Batch((BatchEntry(many, 0, 1, (), samples=True),)))
    one.drop_pass()
    one.end_pass(1)


def test_without_a_predictor_it_is_said_how_to_get_one(bare, slabs):
    settings = Settings(model=str(bare), num_threads=1, kv_cache_bytes=2**20, predictor="sida")
    resolve(settings)  # all experts are in memory
    with pytest.raises(CheckpointError, match="moeflow train predictor"):
        Engine.load(streamed_config(str(bare), slabs, 9, predictor="sida"))
