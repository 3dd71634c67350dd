"""Passes that drop choices beyond experts' capacity: transformers' tokens with the same drops, wherever experts are."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from contextlib import closing
from math import ceil

import pytest
import torch

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.engine_config import ExpertSlotsConfig
from moeflow.core.errors import ConfigError
from moeflow.engine import expert_store
from moeflow.engine.engine import Engine
from moeflow.engine.ranks import rank_processes
from moeflow.kernels.cpu import extension
from moeflow.models.registry import read_model_config
from moeflow.planner.choices.capacity_choice import with_capacity
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.choices.served_name import served_name
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from moeflow.workload.routing_trace import read_routing_trace
from tests.engine.ranks.rank_threads import RankThreads
from tests.engine.streamed_runs import answers
from tests.tiny_llama import write_tiny_llama
from tests.tiny_mixtral import write_tiny_mixtral
from tests.tiny_switch import write_tiny_switch

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
PROMPT = [(7 * index) % 250 + 2 for index in range(60)]
FACTOR, NUM_EXPERTS, TOP_K, NUM_LAYERS, NUM_NEW = 0.75, 8, 2, 3, 12


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    theirs = write_tiny_mixtral(
        folder, num_local_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K, num_hidden_layers=NUM_LAYERS
    )
    return theirs, str(folder)


def config_of(folder, **settings):
    values = {"num_threads": 1, "kv_cache_bytes": 2**21, "capacity_factor": FACTOR}
    return resolve(Settings(model=folder, **(values | settings))).config


def run(config, prompts):
    engine = Engine.load(config)
    try:
        tokens, errors = answers(engine, prompts, NUM_NEW)
        assert not errors
        return tokens, engine.stats()
    finally:
        engine.close()


def kept_of(topk_ids, factor=FACTOR):
    """Return whether each choice of a pass is kept: a loop over tokens in order of arrival."""
    most = max(ceil(TOP_K * factor * len(topk_ids) / NUM_EXPERTS), 1)
    taken = Counter()
    kept = []
    for chosen in topk_ids:
        kept.append([taken[expert] < most for expert in chosen])
        taken.update(chosen)
    return torch.tensor(kept)


@pytest.fixture(scope="module")
def expected(made):
    """transformers' tokens for the prompt, where its routers drop choices of the prompt's pass, and how many."""
    theirs, _ = made
    num_dropped = 0

    def drop(module, given, found):
        nonlocal num_dropped
        logits, weights, ids = found
        kept = kept_of(ids.tolist())
        num_dropped += int((~kept).sum())
        return logits, weights * kept, ids

    hooks = [layer.mlp.gate.register_forward_hook(drop) for layer in theirs.model.layers]
    with torch.no_grad():
        found = theirs.generate(
            torch.tensor([PROMPT]), max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, do_sample=False, use_cache=True
        )
    for hook in hooks:
        hook.remove()
    return found[0, len(PROMPT) :].tolist(), num_dropped


def streamed(config, folder, file):
    index = pack(folder, file, cache_dir=None)
    experts = ExpertSlotsConfig(
        packed_weights_file=str(file),
        num_slots=9,
        slab_bytes=index.spec.slab_bytes,
        policy="lru",
        predictor="next-router",
    )
    return dataclasses.replace(config, experts=experts)


@pytest.mark.parametrize("way", ["packed", "torch", "streamed", "whole", "sliced"])
def test_tokens_are_those_of_transformers_with_the_same_drops(made, expected, tmp_path, monkeypatch, way):
    monkeypatch.setattr(expert_store, "probe_read_depth", lambda *_: 2)
    monkeypatch.setattr(rank_processes, "RankProcesses", RankThreads)
    folder = made[1]
    ranks = {"whole": {"num_ranks": 2}, "sliced": {"num_ranks": 2, "expert_layout": "sliced"}}
    config = config_of(folder, **ranks.get(way, {}))
    if way == "streamed":
        config = streamed(config, folder, tmp_path / "slabs")
    if way == "torch":
        config = dataclasses.replace(config, cpu_isa="", packed_file="")
    (tokens,), stats = run(config, [PROMPT])
    want, num_dropped = expected
    assert tokens == want
    assert stats.dropped_choices_total == num_dropped > 0
    assert stats.expert_choices_total == NUM_LAYERS * TOP_K * (len(PROMPT) + NUM_NEW - 1)
    (without,), _ = run(config_of(folder, capacity_factor=None), [PROMPT])
    assert without != want


def test_passes_of_several_requests_drop_what_arrives_last(made, tmp_path):
    config = config_of(made[1], record_routing=tmp_path / "routing", max_num_batched_tokens=48)
    _, stats = run(config, [PROMPT, PROMPT[:30], [5], PROMPT[20:]])
    trace = read_routing_trace(tmp_path / "routing")
    assert any(len(routed.texts) > 2 for routed in trace.passes)
    dropped = sum(int((~kept_of(layer.tolist())).sum()) for routed in trace.passes for layer in routed.ids)
    assert stats.dropped_choices_total == dropped > 0
    assert stats.expert_choices_total == sum(routed.ids.size for routed in trace.passes)


def test_a_large_capacity_drops_nothing(made):
    plain, stats = run(config_of(made[1], capacity_factor=None), [PROMPT, PROMPT[:20]])
    assert (stats.expert_choices_total, stats.dropped_choices_total) == (0, 0)
    found, stats = run(config_of(made[1], capacity_factor=float(NUM_EXPERTS)), [PROMPT, PROMPT[:20]])
    assert (found, stats.dropped_choices_total) == (plain, 0)


def test_prefixes_are_not_shared_and_the_name_shows_the_capacity(made):
    plan = resolve(Settings(model=made[1], capacity_factor=1.25))
    assert not plan.config.scheduler.prefix_caching
    assert plan.config.model_name.endswith(":capacity-1.25")
    assert {"capacity_factor", "prefix_caching"} <= {name for name, _ in plan.plan.reasons}
    assert resolve(Settings(model=made[1])).config.scheduler.prefix_caching


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"capacity_factor": 0.0}, "must be a positive number, not 0"),
        ({"capacity_factor": float("nan")}, "must be a positive number, not nan"),
        ({"speculators": ("suffix",)}, "--capacity-factor.*--speculator"),
        ({"stages": "2"}, "--capacity-factor.*--stages"),
        ({"num_ranks": 2, "attention_layout": "data"}, "--capacity-factor.*--attention-layout data"),
        ({"num_ranks": 2, "rank_schedule": "asynchronous"}, "--capacity-factor.*counts whole passes"),
        ({"prompt_cache_bytes": 2**30}, "prefixes are not shared"),
    ],
    ids=json.dumps,
)
def test_what_does_not_go_with_it_is_refused(made, settings, problem):
    with pytest.raises(ConfigError, match=problem):
        config_of(made[1], **settings)


def test_models_without_experts_have_no_capacity(tmp_path):
    write_tiny_llama(tmp_path)
    with pytest.raises(ConfigError, match="has no experts"):
        config_of(str(tmp_path))


def test_an_encoder_has_it_too(tmp_path):
    write_tiny_switch(tmp_path)
    _, stats = run(config_of(str(tmp_path), max_model_len=160), [list(range(2, 60))])
    assert stats.dropped_choices_total > 0


def test_experts_on_a_gpu_have_none(made):
    with closing(open_checkpoint(made[1])) as checkpoint:
        shape = read_model_config(checkpoint)
    with pytest.raises(ConfigError, match=r"experts are on a GPU \(--device cpu"):
        with_capacity(Settings(capacity_factor=1.0), shape, "cuda:0", [])


def test_names_of_several_models_show_it():
    assert served_name("a", {"capacity_factor": 1.5, "lossy_routing": "sida"}) == "a:lossy-sida:capacity-1.5"
    assert served_name("a", {"capacity_factor": None}) == "a"
