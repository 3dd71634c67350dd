from __future__ import annotations

import dataclasses
from contextlib import closing

import pytest

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError
from moeflow.kernels.cpu import extension
from moeflow.planner.costs.routing_profile import EVEN_ROUTING
from moeflow.planner.known_routing import known_routing, routing_file
from moeflow.planner.simulator.routing_study import study_routing
from moeflow.settings.settings import Settings
from moeflow.text.tokenizer import Tokenizer
from moeflow.train import routing_learning
from moeflow.train.routing_learning import ensure_profile, learning_text, other_text
from moeflow.workload.routing_trace import read_routing_trace
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = [pytest.mark.skipif(not extension.is_available(), reason=extension.why_not()), pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, num_local_experts=8, num_hidden_layers=2)
    return str(folder)


@pytest.fixture
def little(monkeypatch):
    monkeypatch.setattr(routing_learning, "NUM_TOKENS", 200)


def settings(model, cache_dir, **others):
    return Settings(model=model, cache_dir=cache_dir, num_threads=1, kv_cache_bytes=2**20, **others)


def test_a_profile_is_learnt_once_and_found_again(model, tmp_path, little, monkeypatch):
    with closing(open_checkpoint(model)) as checkpoint:
        file = routing_file(checkpoint, tmp_path)

        def known():
            return known_routing(checkpoint, tmp_path)

        assert known() == EVEN_ROUTING
        check_learning(model, tmp_path, known, monkeypatch)
        file.write_text("damaged")
        assert known() == EVEN_ROUTING


def check_learning(model, tmp_path, known, monkeypatch):
    told = []
    learnt = ensure_profile(settings(model, tmp_path), lambda *done: told.append(done))
    assert learnt.num_tokens == 200
    shares = [done / total for done, total in told]
    assert shares == sorted(shares), "both parts of the work are in one bar"
    assert shares[-1] == 1
    assert known() == learnt
    (choices,) = (tmp_path / "routing").glob("*.moe")
    assert sum(routed.ids.shape[1] for routed in read_routing_trace(choices).passes) == 200
    monkeypatch.setattr(routing_learning, "_record", None)  # would fail
    assert ensure_profile(settings(model, tmp_path)) == learnt


@pytest.fixture
def studied(monkeypatch):
    """Return a list that gets the choices that profiles are learnt from."""
    found = []
    monkeypatch.setattr(
        routing_learning, "study_routing", lambda ids, *rest: found.append(ids) or study_routing(ids, *rest)
    )
    return found


def test_prompts_computed_together_are_in_order(model, tmp_path, little, studied, monkeypatch):
    """One prompt a pass and many a pass are the same text, so that they must be the same study."""
    monkeypatch.setattr(routing_learning, "SEQUENCE_TOKENS", 30)
    limited = routing_learning._to_learn
    for number, limits in enumerate(({"max_num_batched_tokens": 64, "max_num_seqs": 8}, {"max_num_seqs": 1})):
        monkeypatch.setattr(
            routing_learning, "_to_learn", lambda *asked, limits=limits: dataclasses.replace(limited(*asked), **limits)
        )
        ensure_profile(settings(model, tmp_path / str(number)))
    assert studied[0].shape == (2, 200, 2)
    assert (studied[0] == studied[1]).all()


def test_what_is_learnt_does_not_depend_on_the_workload_that_is_planned_for(model, tmp_path, little, studied):
    ensure_profile(settings(model, tmp_path / "short", max_model_len=24, max_num_seqs=1, max_num_batched_tokens=16))
    ensure_profile(settings(model, tmp_path / "any"))
    assert (studied[0] == studied[1]).all()


def test_a_model_without_a_tokenizer_cannot_be_learnt(model, tmp_path, little, monkeypatch):
    def missing(path):
        raise CheckpointError("is missing", file=path, remedy="Copy it")

    monkeypatch.setattr(Tokenizer, "load", missing)
    with pytest.raises(CheckpointError):
        ensure_profile(settings(model, tmp_path))


def test_what_is_checked_with_was_not_learnt_from(model):
    tokenizer = Tokenizer.load(model)
    learnt, other = tokenizer.decode(learning_text(tokenizer)), tokenizer.decode(other_text(tokenizer))
    assert len(other) > 1000
    assert not any(other[start : start + 200] in learnt for start in range(0, len(other) - 200, 200))
