"""Predicting an encoder's experts in parallel with its passes saves reads and leaves answers unchanged."""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import closing

import pytest
import torch

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.batch import Batch, BatchEntry
from moeflow.core.request import Request, RequestStatus
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.trial import Trial
from moeflow.engine import expert_store
from moeflow.experts.prefetch.driver import PrefetchDriver
from moeflow.experts.prefetch.expert_tables import HASH_BUILDING, ExpertTable, ExpertTables
from moeflow.experts.prefetch.input_source import InputSource
from moeflow.kernels.cpu import extension
from moeflow.models.expert_predictor.network import ExpertPredictor, PredictorShape
from moeflow.models.expert_predictor.saved import predictor_folder, save_predictor
from moeflow.pipeline.runtime.trace import Trace
from tests.engine.streamed_runs import follow_all
from tests.engine.test_encoder_decoder import config_of, run
from tests.engine.test_streamed_model import streamed_config
from tests.marks import thorough_unless
from tests.tiny_switch import write_tiny_switch

LAYERS, EXPERTS = 2, 8  # of the encoder
SHAPE = PredictorShape(
    embedding_size=32, num_layers=LAYERS, num_experts=EXPERTS, top_k=1, hidden_size=16, window=32, is_causal=False
)

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Return a model with a predictor that has learnt nothing."""
    folder = tmp_path_factory.mktemp("target")
    write_tiny_switch(folder, num_experts=EXPERTS)
    torch.manual_seed(3)
    with closing(open_checkpoint(folder)) as checkpoint:
        save_predictor(ExpertPredictor(SHAPE), checkpoint, predictor_folder(folder), {})
    return folder


@pytest.fixture(autouse=True)
def quick_probe(monkeypatch):
    monkeypatch.setattr(expert_store, "probe_read_depth", lambda *_: 2)


def streamed(folder, slabs, num_slots, **settings):
    experts = streamed_config(str(folder), slabs, num_slots, predictor="sida").experts
    return dataclasses.replace(config_of(folder, **settings), experts=experts)


@pytest.fixture
def stores(monkeypatch):
    """Have all predictions be followed; return the stores of engines that are loaded."""
    found = []
    prefetch_by = expert_store.ExpertStore.prefetch_by

    def always_on(self, sources):
        prefetch_by(self, sources)
        follow_all(self.prefetch)
        found.append(self)

    monkeypatch.setattr(expert_store.ExpertStore, "prefetch_by", always_on)
    return found


@pytest.mark.parametrize(
    ("max_num_seqs", "num_slots"),
    thorough_unless(
        lambda max_num_seqs, num_slots: (max_num_seqs == 4) == (num_slots == 9), itertools.product((1, 4), (3, 9, 24))
    ),
)
def test_answers_are_the_same_whatever_is_predicted(target, tmp_path, stores, num_slots, max_num_seqs):
    config = streamed(target, tmp_path / "slabs", num_slots, max_num_seqs=max_num_seqs)
    assert run(config)[0] == run(config_of(target, max_num_seqs=max_num_seqs))[0]
    (store,) = stores
    (source,) = store.prefetch.sources
    assert isinstance(source, InputSource)
    assert store.cache.stats().prefetched_bytes > 0
    assert not source._tables._waiting
    store.cache.check_integrity()


def embed(token_ids):
    return torch.randn(300, SHAPE.embedding_size, generator=torch.Generator().manual_seed(2))[token_ids]


class Cache:
    """Notes prefetches."""

    stall_s = 0.0

    def __init__(self):
        self.asked = []

    def prefetch_pass(self, numbers):
        self.asked.append(numbers)


def input_of(name, num_tokens):
    request = Request(name, list(range(2, 2 + num_tokens + 1)), SamplingParams(), max_tokens=9)
    request.num_encoder_tokens = num_tokens
    return request


def batch_of(*requests, start=0):
    return Batch(
        [BatchEntry(request, start, request.num_encoder_tokens + 1 - start, (), samples=True) for request in requests]
    )


def experts_of(predictor, request):
    """Return which experts tokens of an input are likeliest to need, and how likely, by layer: {number: sum}."""
    logits = predictor(embed(request.token_ids(0, request.num_encoder_tokens))[None])[0]
    wanted = {}
    for of_token in logits.softmax(-1):
        for layer, row in enumerate(of_token):
            number = layer * EXPERTS + int(row.argmax())
            wanted[number] = wanted.get(number, 0.0) + float(row.max())
    return wanted


def in_order(wanted):
    return sorted(wanted, key=lambda number: (number // EXPERTS, -wanted[number]))


@pytest.fixture
def made():
    torch.manual_seed(4)
    predictor = ExpertPredictor(SHAPE).requires_grad_(False)
    trial, cache, trace = Trial("sida", starts_on=True), Cache(), Trace()
    tables = ExpertTables(predictor, embed, top_k=SHAPE.top_k, trace=trace)
    driver = PrefetchDriver(cache, [InputSource(trial, EXPERTS, tables)])
    with closing(driver):
        yield driver, tables, predictor, trial, cache, trace


def test_what_waits_is_read_behind_what_is_computed(made):
    driver, tables, predictor, _, cache, trace = made
    first, second, third = (input_of(name, num_tokens) for name, num_tokens in (("a", 40), ("b", 9), ("c", 5)))
    for request in (first, second, third):
        driver.expect(request)
    third.status = RequestStatus.FINISHED
    for table in tables._waiting.values():
        assert isinstance(table.result(), ExpertTable)
    driver.begin_pass(batch_of(first))
    now = in_order(experts_of(predictor, first))
    then = in_order(experts_of(predictor, second))
    assert cache.asked == [[*now, *(number for number in then if number not in now)]]
    assert list(tables._waiting) == [second]
    driver.begin_pass(batch_of(first, start=40))  # the decoder's
    assert len(cache.asked) == 1
    driver.begin_pass(batch_of(second))
    assert cache.asked[1] == then
    (row,) = trace.rows
    assert row.name == HASH_BUILDING
    assert [span.label.name for span in row.spans] == [f"input of {number} tokens" for number in (40, 9, 5)]


def test_nothing_is_asked_while_the_governor_is_against_it(made):
    driver, _, predictor, trial, cache, trace = made
    request = input_of("a", 12)
    trial.is_on = False
    driver.expect(request)
    driver.begin_pass(batch_of(request))
    assert not cache.asked
    assert not trace.rows[0].spans
    trial.is_on = True  # its trial continues: unexpected inputs are asked now
    driver.begin_pass(batch_of(request))
    assert cache.asked == [in_order(experts_of(predictor, request))]
