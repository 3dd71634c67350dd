"""However processes share a model, each request gets the tokens and log-probabilities of one process, to the bit.

In passes that mix prompts in chunks with decodes, with prefixes that are found again, and with blocks so few that
requests are preempted.
"""

from __future__ import annotations

import contextlib
from collections import Counter

import numpy as np
import pytest
from transformers import Gemma4TextConfig

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import ConfigError
from moeflow.core.parallel_config import ParallelConfig
from moeflow.engine.ranks import rank_upkeep
from moeflow.kernels.cpu import extension
from moeflow.models.layers.ranks.expert_ranks import ExpertRanks
from moeflow.parallel.placement import layouts
from moeflow.parallel.placement.eplb import place_by_load
from moeflow.parallel.placement.placement import ExpertPlacement
from moeflow.planner.choices import rank_choice
from moeflow.planner.choices.rank_choice import RankMemory
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from moeflow.planner.known_routing import popularity_file
from moeflow.workload.routing_trace import RoutedPass, RoutingTrace, TraceHeader, read_routing_trace
from tests.engine.ranks.mixed_requests import config_of, resolved, run
from tests.models.parity import random_model
from tests.models.test_gemma4_text import MOE
from tests.shapes import TINY
from tests.tiny_llama import write_tiny_llama
from tests.tiny_mixtral import write_tiny_mixtral
from tests.workload.routing_files import write_trace

TINY_EXPERTS = TINY.with_fields(num_experts=4)
pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in ("mixtral", "llama", "gemma4_text")}
    write_tiny_mixtral(folders["mixtral"], hidden_size=80, head_dim=16, intermediate_size=72)
    write_tiny_llama(folders["llama"], attention_bias=True)
    longer = MOE | {"vocab_size": 258, "max_position_embeddings": 512}
    config = Gemma4TextConfig(**longer, attention_k_eq_v=True, num_global_key_value_heads=1)
    random_model(config).save_pretrained(folders["gemma4_text"])
    return {name: str(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def alone(models):
    return {name: run(config_of(model))[0] for name, model in models.items()}


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("mixtral", {"num_ranks": 2, "expert_layout": "sliced"}),
        ("mixtral", {"num_ranks": 3, "expert_layout": "sliced", "attention_layout": "tensor"}),
        ("llama", {"num_ranks": 2, "attention_layout": "tensor"}),
        ("gemma4_text", {"num_ranks": 2, "attention_layout": "tensor"}),
        ("mixtral", {"num_ranks": 3, "rank_schedule": "asynchronous"}),
        (
            "mixtral",
            {"num_ranks": 2, "expert_layout": "sliced", "attention_layout": "tensor", "rank_schedule": "asynchronous"},
        ),
        ("gemma4_text", {"num_ranks": 2, "attention_layout": "tensor", "rank_schedule": "asynchronous"}),
    ],
    ids=str,
)
def test_requests_get_the_tokens_and_log_probabilities_of_one_process(models, alone, in_threads, name, layouts):
    found, _ = run(config_of(models[name], **layouts))
    assert found == alone[name]
    assert found[1] > 0  # were preempted
    assert found[2] > 0


@pytest.mark.parametrize("layouts", [{"expert_layout": "sliced"}, {"num_ranks": 3, "expert_layout": "expert"}], ids=str)
def test_ranks_with_sequences_of_their_own_give_the_bits_of_one_process(models, alone, in_threads, layouts):
    found, _ = run(config_of(models["mixtral"], **{"num_ranks": 2, "attention_layout": "data"} | layouts))
    assert found[0] == alone["mixtral"][0]
    assert found[1] > 0  # were preempted
    assert found[2] == 0  # prefixes are not shared: another rank may have them


@pytest.mark.parametrize(
    ("name", "settings", "complaint"),
    [
        ("llama", {"num_ranks": 2, "attention_layout": "data"}, "without experts.*--attention-layout tensor"),
        ("mixtral", {"num_ranks": 4, "stages": "2", "attention_layout": "data"}, "remove --stages"),
        ("llama", {"num_ranks": 2, "attention_layout": "replicated"}, "without experts.*--attention-layout tensor"),
        ("llama", {"num_ranks": 5, "attention_layout": "tensor"}, "5 ranks .* 4 attention heads"),
        ("mixtral", {"num_ranks": 5, "expert_layout": "expert"}, "only 4 experts.*--expert-layout sliced"),
        ("mixtral", {"num_ranks": 2, "expert_layout": "round"}, "expert_layout 'round' is unknown.*expert, sliced"),
        ("mixtral", {"expert_layout": "sliced"}, "for several ranks"),
        ("mixtral", {"attention_layout": "tensor"}, "for several ranks"),
        ("mixtral", {"rank_schedule": "asynchronous"}, "for several ranks"),
        ("mixtral", {"num_ranks": 2, "rank_schedule": "both"}, "'both' is unknown; use one of auto, synchronous"),
        ("mixtral", {"num_ranks": 2, "stages": "2", "rank_schedule": "asynchronous"}, "for several ranks"),
        (
            "mixtral",
            {"num_ranks": 4, "stages": "2", "rank_schedule": "asynchronous"},
            "does not go with stages.*remove one",
        ),
        (
            "mixtral",
            {"num_ranks": 2, "record_routing": "routing.moe", "rank_schedule": "asynchronous"},
            "does not go with a record of routing",
        ),
        (
            "mixtral",
            {"num_ranks": 2, "record_routing": "routing.moe", "attention_layout": "data"},
            "--record-routing.*remove --attention-layout data",
        ),
    ],
)
def test_what_cannot_be_shared_so_is_refused_with_what_to_do(models, name, settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        resolved(models[name], **settings)


@pytest.fixture
def uneven(monkeypatch):
    """A layout that another package adds: all experts are on the first rank, but for one."""

    def place(loads, num_ranks):
        homes = (*((0,),) * (loads.shape[1] - 1), (1,))
        return ExpertPlacement(num_ranks, (homes,) * len(loads))

    monkeypatch.setattr(layouts, "LAYOUTS", layouts.LAYOUTS._own | {"uneven": place})
    monkeypatch.setattr(rank_choice, "ADDED_LAYOUTS", ("uneven",))


def test_each_rank_is_given_room_for_what_another_packages_layout_gives_it(models, uneven):
    common = {"num_ranks": 2, "attention_layout": "replicated", "kv_cache_bytes": 2**20}
    found = resolved(models["mixtral"], expert_layout="uneven", **common).plan
    why = "2: each has 1 or 3 of the 4 experts of a layer at most, as uneven places them"
    assert dict(found.reasons)["ranks"] == why
    costs = ModelCosts(TINY_EXPERTS, Formats(matrices="float32", embeddings="float32", kv="float32"))
    of_expert = costs.experts_bytes / 4
    even, ours = (
        RankMemory.of(costs, ParallelConfig(num_ranks=2, expert_layout=layout)) for layout in ("expert", "uneven")
    )
    assert ours.weight_bytes == pytest.approx([even.weight_bytes[0] + of_expert, even.weight_bytes[1] - of_expert])
    assert resolved(models["mixtral"], **common).plan.config.parallel.expert_layout != "uneven"  # unless it is named


@pytest.mark.parametrize("more", [{"expert_placement": "load"}, {"num_redundant_experts": 1}])
def test_what_is_said_of_moeflows_own_layout_does_not_go_with_another_packages(models, uneven, more):
    with pytest.raises(ConfigError, match="--expert-layout expert"):
        resolved(models["mixtral"], num_ranks=2, expert_layout="uneven", **more)


def test_as_many_ranks_as_experts_or_heads_can_share_a_model(models):
    assert resolved(models["mixtral"], num_ranks=4).config.parallel.num_ranks == 4
    plan = resolved(models["llama"], num_ranks=4, attention_layout="tensor").plan
    why = "4: each has 1 of the 4 attention heads, and as much of dense layers and the head"
    assert dict(plan.reasons)["ranks"] == why


def test_a_plan_says_what_each_rank_has(models):
    plan = resolved(
        models["mixtral"], num_ranks=2, expert_layout="sliced", attention_layout="tensor", kv_cache_bytes=2**20
    ).plan
    reasons = dict(plan.reasons)
    assert reasons["ranks"] == (
        "2: each has a slice of every expert, 32 or 40 of 72 units; 2 of the 4 attention heads, and as much of dense "
        "layers and the head"
    )
    assert reasons["memory of ranks"] == "412.7 KiB and 1.0 MiB, 497.3 KiB and 1.0 MiB"


def test_fewer_heads_a_rank_leave_room_for_more_tokens(models):
    settings = {"num_ranks": 2, "kv_cache_bytes": 2**20}
    whole = resolved(models["mixtral"], **settings).config.scheduler.num_blocks
    assert resolved(models["mixtral"], attention_layout="tensor", **settings).config.scheduler.num_blocks == 2 * whole


@pytest.mark.parametrize("layouts", [{"num_ranks": 2}, {"stages": "2", "num_ranks": 4}], ids=str)
def test_recorded_routing_places_experts_at_the_start(models, alone, in_threads, tmp_path, layouts):
    """Choices of a run alone are those of `moeflow pack`; counted pair by pair, they decide where experts begin."""
    with contextlib.closing(open_checkpoint(models["mixtral"])) as checkpoint:
        file = popularity_file(checkpoint, tmp_path)
    file.parent.mkdir(parents=True)
    run(config_of(models["mixtral"], record_routing=file))
    choices = read_routing_trace(file).passes
    config = config_of(models["mixtral"], cache_dir=tmp_path, expert_layout="expert", **layouts)
    counted = [
        Counter(expert for routed in choices for token in routed.ids[layer].tolist() for expert in token)
        for layer in range(len(config.parallel.expert_loads))
    ]
    assert config.parallel.expert_loads == tuple(tuple(each[expert] for expert in range(4)) for each in counted)
    loads = np.array(config.parallel.expert_loads, float)
    want = place_by_load(loads, 2, 2, 0)
    assert want != ExpertPlacement.by_index(len(loads), 4, 2)
    begun = []
    in_threads.setattr(rank_upkeep, "ExpertRanks", recording(begun))
    assert run(config)[0] == alone["mixtral"]
    if "stages" in layouts:
        homes = {placement.homes for placement in begun}
        assert {it for part in homes for it in part} == set(want.homes)
    else:
        assert [placement == want for placement in begun] == [True, True]
    plan = resolved(models["mixtral"], cache_dir=tmp_path, expert_layout="expert", **layouts).plan
    assert "placed by recorded loads, moved as loads call for it" in dict(plan.reasons)["ranks"]


@pytest.mark.parametrize(("num_layers", "num_experts"), [(1, 4), (2, 3)])
def test_recorded_routing_of_another_shape_places_no_experts(models, tmp_path, num_layers, num_experts):
    with contextlib.closing(open_checkpoint(models["mixtral"])) as checkpoint:
        file = popularity_file(checkpoint, tmp_path)
    file.parent.mkdir(parents=True)
    header = TraceHeader(identity="x", num_layers=num_layers, num_experts=num_experts, top_k=2)
    write_trace(file, RoutingTrace(header, [RoutedPass(np.zeros((num_layers, 4, 2), int), 1, 0.1)], 0))
    parallel = config_of(models["mixtral"], cache_dir=tmp_path, expert_layout="expert", num_ranks=2).parallel
    assert (parallel.places_by_load, parallel.expert_loads) == (True, ())


def recording(begun):
    """Return a class that also notes each rank's first placement."""

    class Recording(ExpertRanks):
        def __init__(self, group, balancer, *more):
            super().__init__(group, balancer, *more)
            begun.append(balancer.placement)

    return Recording
