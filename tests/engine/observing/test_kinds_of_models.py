"""Each token has the experts that it has in a plain model, however a model computes and wherever its experts are."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch

from moeflow.core.engine_messages import Submission
from moeflow.core.observation import NOT_COMPUTED, TIERS, ExpertQuestion, Watch
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine import expert_store
from moeflow.engine.engine import Engine
from moeflow.kernels.cpu import extension
from moeflow.models.expert_predictor.network import PredictorShape
from moeflow.pipeline.catalog import OFFLOADING
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.engine.observing.observed_runs import check_sums, computed, observe, observed_run, plain_run, table
from tests.engine.offload.offloaded_runs import offloaded, sharing
from tests.engine.ranks.conftest import in_threads
from tests.engine.ranks.mixed_requests import config_of as mixed_config
from tests.engine.submissions import submission
from tests.engine.test_lossy_decoders import SIZES, with_predictors
from tests.engine.test_streamed_model import streamed_config
from tests.tiny_llama import write_tiny_llama
from tests.tiny_mixtral import write_tiny_mixtral
from tests.tiny_switch import write_tiny_switch

__all__ = ["in_threads"]
pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())

LONG = [(7 * index) % 250 + 2 for index in range(70)]
JOBS = [
    submission("long", LONG, max_tokens=12, temperature=0.0),
    submission("short", [5], max_tokens=12),
    submission("other", LONG[30:55], max_tokens=12),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, num_local_experts=5, num_hidden_layers=3, hidden_size=80, head_dim=16)
    return str(folder)


@pytest.fixture(scope="module")
def plain(model):
    return observed_run(mixed_config(model, num_blocks=60), JOBS)


def test_layers_that_run_one_by_one(model, plain):
    with closing(Engine.load(mixed_config(model, num_blocks=60))) as engine:
        engine._runner.model._packed = None
        seen = observe(engine, JOBS)
    check_same(seen, plain)


@pytest.mark.parametrize("num_slots", [4, 9])
@pytest.mark.parametrize("predictor", ["none", "next-router"])
def test_experts_from_disk_with_their_hits_and_misses(model, plain, tmp_path, monkeypatch, num_slots, predictor):
    monkeypatch.setattr(expert_store, "probe_read_depth", lambda *_: 2)
    limits = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "max_model_len": 160}
    config = streamed_config(model, tmp_path / "slabs", num_slots, predictor=predictor, **limits)
    with closing(Engine.load(config)) as engine:
        engine.look(Watch())
        before = engine.stats()
        seen = observe(engine, JOBS)
        after = engine.stats()
        resident = engine._runner.experts.cache.are_resident()
    check_same(seen, plain, same_passes=False)
    sight = seen.sight
    hits, misses = (np.frombuffer(it, "<i8").reshape(3, 5) for it in (sight.hits, sight.misses))
    assert hits.sum() == after.expert_hits_total - before.expert_hits_total
    missed = after.expert_misses_total - before.expert_misses_total
    assert misses.sum() == missed + after.expert_late_total - before.expert_late_total > 0
    assert hits.min() >= 0
    assert ((hits + misses > 0) == (table(sight.total, sight) > 0)).all()
    tiers = np.frombuffer(sight.residency, np.uint8).reshape(3, 5)
    assert (tiers == np.where(resident, TIERS.index("slot"), TIERS.index("disk"))).all()
    assert resident.sum() == num_slots
    assert sight.read_bytes > 0
    assert sight.read_bytes % expert_size(config) == 0


def expert_size(config) -> int:
    return config.experts.slab_bytes


def test_experts_in_memory_have_no_hits(plain):
    assert (plain.sight.hits, plain.sight.misses) == (b"", b"")
    assert set(plain.sight.residency) == {TIERS.index("ram")}
    assert (plain.sight.read_bytes, plain.sight.stall_s) == (0, 0.0)


@pytest.mark.parametrize("pipeline", OFFLOADING)
def test_models_on_a_device_that_is_smaller(model, plain, pipeline):
    for micro_batch, share, num_hosted in ((1, 0.0, 0), (3, 0.4, 0), (1000, 0.4, 0), (3, 0.0, 2)):
        if num_hosted and pipeline != "cgopipe":
            continue
        config = sharing(offloaded(model, pipeline, micro_batch, share, max_num_batched_tokens=48), num_hosted)
        seen = observed_run(config, JOBS)
        check_same(seen, plain, same_passes=False)
        assert seen.tokens == plain_run(config, JOBS)
        tiers = np.frombuffer(seen.sight.residency, np.uint8).reshape(3, 5)
        assert (tiers == [TIERS.index("ram")] * 3 + [TIERS.index("gpu" if share else "ram")] * 2).all()


@pytest.mark.parametrize(
    "layouts",
    [
        {"num_ranks": 2},
        {"num_ranks": 2, "expert_layout": "sliced"},
        {"num_ranks": 3, "rank_schedule": "asynchronous"},
        {"num_ranks": 2, "attention_layout": "data", "expert_layout": "expert"},
        {"num_ranks": 3, "attention_layout": "data", "expert_layout": "sliced"},
    ],
    ids=str,
)
def test_ranks_that_share_each_layer(model, plain, in_threads, layouts):
    config = mixed_config(model, num_blocks=60, **layouts)
    seen = observed_run(config, JOBS)
    check_same(seen, plain)
    assert set(seen.sight.residency) == {TIERS.index("ram")}


def test_a_stage_counts_its_own_layers_and_names_the_others(model, plain, in_threads):
    seen = observed_run(mixed_config(model, num_blocks=60, stages="2"), JOBS)
    assert seen.tokens == plain.tokens
    own = len(seen.sight.layers)
    assert seen.sight.layers == list(range(own))
    assert 0 < own < 3
    assert seen.sight.not_counted.startswith(f"layers {own} to 2: other ranks")
    assert (table(seen.sight.total, seen.sight) == table(plain.sight.total, plain.sight)[:own]).all()
    for name, routes in plain.routes.items():
        assert (seen.routes[name] == routes[:, :own]).all()


def test_a_dense_model_has_passes_and_no_experts(tmp_path):
    write_tiny_llama(tmp_path)
    seen = observed_run(mixed_config(str(tmp_path), num_blocks=60), JOBS)
    assert not seen.sight.is_counting
    assert seen.sight.not_counted == "the model has no experts"
    assert (seen.sight.layers, seen.sight.total.counts, seen.sight.residency) == ([], b"", b"")
    assert all(not routes.size for routes in seen.routes.values())


def test_an_encoder_decoder_counts_inputs_and_outputs_in_their_layers(tmp_path):
    oracle = write_tiny_switch(tmp_path)
    config = resolve(
        Settings(model=str(tmp_path), num_threads=1, max_model_len=160, max_num_seqs=2, kv_cache_bytes=2**21)
    ).config
    sampling = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    inputs = {"a": [5, 9, 200, 31], "b": list(range(2, 75)), "c": [7]}
    jobs = [Submission(name, token_ids, sampling, seed=1) for name, token_ids in inputs.items()]
    seen = observed_run(config, jobs)
    assert seen.tokens == plain_run(config, jobs)
    check_sums(seen.sight)
    num_encoder = seen.sight.num_encoder_layers
    num_inputs, num_outputs = sum(map(len, inputs.values())), 9 * len(inputs)
    num_decoder = len(seen.sight.layers) - num_encoder
    assert seen.sight.total.tokens_of_layers == [num_inputs] * num_encoder + [num_outputs] * num_decoder
    for name, token_ids in inputs.items():
        asked = {
            "input_ids": torch.tensor([token_ids]),
            "decoder_input_ids": torch.tensor([[0, *seen.tokens[name]]]),
            "output_router_logits": True,
        }
        with torch.inference_mode():
            outputs = oracle(**asked)
        encoder, decoder = (
            torch.cat(logits).argmax(-1).numpy()
            for logits in (outputs.encoder_router_logits, outputs.decoder_router_logits)
        )
        routes = seen.routes[name]
        assert (encoder == routes[: len(token_ids), :num_encoder, 0].T).all()
        assert (routes[: len(token_ids), num_encoder:] == NOT_COMPUTED).all()
        begin = len(routes) - len(seen.tokens[name]) - 1
        assert (decoder[:, :-1] == routes[begin:-1, num_encoder:, 0].T).all()
        assert (routes[begin:, :num_encoder] == NOT_COMPUTED).all()


def test_choices_beyond_the_capacity_count_as_choices(model):
    config = mixed_config(model, num_blocks=60, capacity_factor=1.0)
    with closing(Engine.load(config)) as engine:
        seen, stats = observe(engine, JOBS), engine.stats()
    check_sums(seen.sight)
    assert stats.dropped_choices_total > 0
    assert table(seen.sight.total, seen.sight).sum() == stats.expert_choices_total


def test_experts_that_a_network_chooses_in_the_place_of_routers(tmp_path):
    write_tiny_mixtral(tmp_path, num_local_experts=8)
    with_predictors(tmp_path, PredictorShape(num_layers=2, top_k=2, **SIZES))
    config = mixed_config(str(tmp_path), num_blocks=60, lossy_routing="sida:3", dtype="float32")
    seen = observed_run(config, JOBS)
    assert seen.tokens == plain_run(config, JOBS)
    check_sums(seen.sight)
    assert seen.sight.top_k == 6
    assert all(len(set(row.tolist())) == 6 for routes in seen.routes.values() for row in routes[:-1].reshape(-1, 6))


def test_a_pass_without_all_choices_is_left_out_and_named(model, monkeypatch):
    with closing(Engine.load(mixed_config(model, num_blocks=60))) as engine:
        engine.look(Watch())
        packed = engine._runner.model.packed_layers
        take = packed.on_choices
        packed.on_choices = lambda topk_ids: take(topk_ids[:, 1:])
        engine.submit(submission("one", [5, 6, 7], max_tokens=1))
        engine.step()
        packed.on_choices = take
        engine.submit(submission("two", [5, 6, 7], max_tokens=1))
        engine.step()
        sight = engine.look(ExpertQuestion())
    assert sight.not_counted == "1 passes: their routers' choices did not arrive whole"
    assert (sight.num_passes, sight.total.tokens) == (1, 3)


def check_same(seen, plain, *, same_passes: bool = True) -> None:
    """Check that all tokens have the same experts, as far as both have computed them."""
    check_sums(seen.sight)
    assert seen.tokens == plain.tokens
    for name, routes in plain.routes.items():
        both = computed(routes) & computed(seen.routes[name])
        assert both[:-1].all()
        assert (seen.routes[name][both] == routes[both]).all()
    assert (table(seen.sight.total, seen.sight) == table(plain.sight.total, plain.sight)).all()
    if same_passes:
        assert seen.sight.num_passes == plain.sight.num_passes
