"""Drafted tokens verified by ranks or stages never change an answer, to the bit of its log-probabilities."""

from __future__ import annotations

from contextlib import closing

import pytest

from moeflow.core.engine_messages import Submission
from moeflow.core.errors import ConfigError
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.kernels.cpu import extension
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from moeflow.speculation.speculation import Speculation
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
GREEDY = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, logprobs=2)
DRAWN = SamplingParams(temperature=0.3, max_tokens=60, ignore_eos=True, logprobs=1)
ASKED = [
    Submission("repeats", [5, 6, 7, 8] * 10, GREEDY, seed=1),
    Submission("short", [9, 10, 9], GREEDY, seed=2),
    Submission("drawn", [5, 6, 7, 8] * 4, DRAWN, seed=3),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder)
    return folder


def run(folder, **settings):
    """Return the tokens and log-probabilities of each request, and statistics."""
    values = {"dtype": "float32", "num_threads": 1, "max_model_len": 160, "max_num_seqs": 4} | settings
    with closing(Engine.load(resolve(Settings(model=str(folder), **values)).config)) as engine:
        for submission in ASKED:
            engine.submit(submission)
        found = {submission.request_id: ([], []) for submission in ASKED}
        while engine.has_work:
            for output in engine.step():
                assert output.error is None
                tokens, logprobs = found[output.request_id]
                tokens += output.token_ids
                logprobs += output.logprobs or ()
            engine.check_integrity()
        return found, engine.stats()


@pytest.fixture(scope="module")
def plain(tiny):
    return run(tiny)[0]


@pytest.fixture(autouse=True)
def passes_of_one_second(monkeypatch):
    """Make every pass appear to last a second, so that drafts pay on a shared machine."""
    note = Speculation.note
    monkeypatch.setattr(Speculation, "note", lambda self, batch, kept, seconds: note(self, batch, kept, 1.0))


LAYOUTS = [
    {"num_ranks": 2},
    {"num_ranks": 2, "attention_layout": "tensor"},
    {"num_ranks": 2, "attention_layout": "data"},
    {"stages": "2"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_suffixes_are_checked_by_all_ranks(tiny, plain, layout, in_threads):
    found, stats = run(tiny, speculators=("suffix",), **layout)
    assert found == plain
    assert stats.speculated_passes_total > 0
    assert stats.accepted_tokens_total > 0


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_model_of_the_first_rank_drafts_for_all(tiny, plain, layout, in_threads):
    found, stats = run(tiny, speculators=("self:int8",), **layout)
    assert found == plain
    assert stats.accepted_tokens_total > 0


def test_first_layers_of_which_ranks_have_parts_are_refused(tiny):
    with pytest.raises(ConfigError, match="whole layers"):
        run(tiny, speculators=("early-exit:1",), num_ranks=2)
