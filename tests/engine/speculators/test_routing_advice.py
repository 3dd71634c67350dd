"""What a model that drafts says of the experts to come: what transformers' routers choose, and no answer changes."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from moeflow.core.request import Request
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine import expert_store
from moeflow.engine.engine import Engine
from moeflow.engine.speculators import draft_model
from moeflow.engine.speculators.routing_advice import RoutingAdvice
from moeflow.kernels.cpu import extension
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.engine.speculators.test_draft_model import drafts_of, say, timeless
from tests.engine.streamed_runs import answers, follow_all, run
from tests.engine.test_streamed_model import streamed_config
from tests.tiny_llama import write_tiny_llama
from tests.tiny_mixtral import write_tiny_mixtral

LAYERS, EXPERTS, TOP_K = 3, 8, 2

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Return a model's folder, and transformers' own of it."""
    folder = tmp_path_factory.mktemp("target")
    model = write_tiny_mixtral(folder, num_local_experts=EXPERTS, num_hidden_layers=LAYERS)
    for layer in model.model.layers:  # norms that decide the choice of experts
        torch.nn.init.uniform_(layer.post_attention_layernorm.weight, -2.0, 2.0)
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Return a dense model with layers of the same size, likewise."""
    folder = tmp_path_factory.mktemp("dense")
    return folder, write_tiny_llama(folder, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def slabs(tmp_path_factory):
    return tmp_path_factory.mktemp("slabs") / "slabs"


@pytest.fixture(autouse=True)
def quick_probe(monkeypatch):
    monkeypatch.setattr(expert_store, "probe_read_depth", lambda *_: 2)


def load(target, slabs, *speculators: str, num_slots: int = 7, kv_dtype: str | None = None) -> Engine:
    """Return an engine that has most experts on disk and prefetches the predicted ones."""
    settings = {"speculators": speculators, "dtype": "float32"}
    config = streamed_config(str(target[0]), slabs, num_slots, predictor="next-router", **settings)
    if kv_dtype is not None:
        drafts = tuple(dataclasses.replace(draft, kv_dtype=kv_dtype) for draft in config.draft_models)
        config = dataclasses.replace(config, draft_models=drafts)
    engine = Engine.load(config)
    timeless(engine)
    driver = engine._runner.experts.prefetch
    follow_all(driver, is_on=False)
    driver.draft_trial.is_on = True
    return engine


def chosen_by(logits: torch.Tensor, layer: int) -> list[frozenset[int]]:
    """Return the numbers of the experts that router logits [T, E] choose."""
    topk = logits.topk(TOP_K).indices.tolist()
    return [frozenset(layer * EXPERTS + expert for expert in row) for row in topk]


def all_layers(per_layer: list[list[frozenset[int]]]) -> list[frozenset[int]]:
    return [frozenset().union(*of_token) for of_token in zip(*per_layer, strict=True)]


def itself(target, _, tokens):
    logits = target[1](tokens, output_router_logits=True).router_logits
    return [chosen_by(of_layer, layer) for layer, of_layer in enumerate(logits)]


def first_layer(target, _, tokens):
    """The first layer's choice is the model's; the predictors of the others get its output."""
    result = target[1](tokens, output_router_logits=True, output_hidden_states=True)
    found = [chosen_by(result.router_logits[0], 0)]
    for number, layer in list(enumerate(target[1].model.layers))[1:]:
        hidden = layer.post_attention_layernorm(result.hidden_states[1][0])
        found.append(chosen_by(hidden @ layer.mlp.gate.weight.T, number))
    return found


def other_model(target, dense, tokens):
    inputs: list[torch.Tensor] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, given: inputs.append(given[0][0]))
        for layer in dense[1].model.layers
    ]
    dense[1](tokens)
    for hook in hooks:
        hook.remove()
    layers = target[1].model.layers
    return [chosen_by(given @ layers[number].mlp.gate.weight.T, number) for number, given in enumerate(inputs)]


@pytest.mark.parametrize(
    ("name", "oracle"), [("self:float32", itself), ("early-exit:1", first_layer), ("dense", other_model)]
)
def test_advice_is_what_the_models_routers_choose(target, dense, slabs, monkeypatch, name, oracle):
    """For each token that a draft says something of, over all layers, whatever became of earlier drafts."""
    monkeypatch.setattr(draft_model, "LEAST_PATH", 0.0)
    monkeypatch.setattr(draft_model, "LEAST_BRANCH", 0.001)
    engine = load(target, slabs, f"{dense[0]}:float32" if name == "dense" else name, kv_dtype="float32")
    (draft,) = drafts_of(engine)
    rng = random.Random(4)
    requests = [
        Request(f"r{i}", [rng.randrange(2, 258) for _ in range(n)], SamplingParams(), max_tokens=300)
        for i, n in enumerate((2, 33))
    ]
    num_checked = 0
    for _ in range(6):
        for request, drafts in zip(requests, draft.propose(requests, 4), strict=True):
            for one in drafts:
                sequence = [*request.token_ids(0, request.num_tokens), *one.token_ids]
                with torch.no_grad():
                    expected = all_layers(oracle(target, dense, torch.tensor([sequence])))
                first = request.num_tokens - 1
                assert list(one.experts) == expected[first : first + len(one.experts)]
                assert len(one.experts) == len(one.token_ids)  # the last one is not computed
                num_checked += len(one.experts)
        for request in requests:
            say(request, *[rng.randrange(2, 258) for _ in range(rng.randrange(1, 4))])
    assert num_checked > 80
    engine.close()


def test_models_of_other_shapes_say_nothing(target, dense, slabs, tmp_path):
    for number, changes in enumerate(({"hidden_size": 64}, {"num_hidden_layers": LAYERS - 1})):
        folder = tmp_path / str(number)
        write_tiny_llama(folder, **changes)
        engine = load(target, slabs, str(folder))
        assert drafts_of(engine)[0]._advice is None
        engine.close()


def test_nobody_asks_where_all_experts_are_in_memory_or_nothing_is_to_be_read_ahead(target, slabs):
    settings = {"model": str(target[0]), "num_threads": 1, "speculators": ("self:int8",)}
    resident = Engine.load(resolve(Settings(**settings)).config)
    assert drafts_of(resident)[0]._advice is None
    assert resident._speculation.absent_of is None
    config = streamed_config(str(target[0]), slabs, 7, predictor="none", speculators=("self:int8",), dtype="float32")
    engine = Engine.load(config)
    assert drafts_of(engine)[0]._advice is None
    engine.close()


def everything(experts_of):
    return lambda *tensors: [frozenset(range(LAYERS * EXPERTS)) for _ in experts_of(*tensors)]


def nothing(experts_of):
    return lambda *tensors: [frozenset() for _ in experts_of(*tensors)]


def others(experts_of):
    return lambda *tensors: [frozenset(range(LAYERS * EXPERTS)) - right for right in experts_of(*tensors)]


def right(experts_of):
    return experts_of


@pytest.mark.parametrize("num_slots", [3, 9])
@pytest.mark.parametrize("told", [right, others, everything, nothing])
def test_tokens_are_the_same_whatever_is_advised(target, slabs, monkeypatch, told, num_slots):
    plain = run(streamed_config(str(target[0]), slabs, num_slots, dtype="float32"))
    asked = RoutingAdvice.experts_of
    monkeypatch.setattr(RoutingAdvice, "experts_of", lambda self, *tensors: told(partial_of(asked, self))(*tensors))
    for names in (["self:int8"], ["early-exit:1"], ["self:int4", "early-exit:2", "suffix"]):
        engine = load(target, slabs, *names, num_slots=num_slots)
        assert answers(engine) == (plain, {})
        assert engine.stats().drafted_tokens_total > 10
        assert not engine._speculation._failed
        engine._runner.experts.cache.check_integrity()
        assert (engine._runner.experts.cache.stats().prefetched_bytes > 0) or told is nothing
        engine.close()


def partial_of(function, instance):
    return lambda *tensors: function(instance, *tensors)


def test_right_advice_leaves_less_to_wait_for(target, slabs):
    """Counted in experts: of the needed experts, passes read fewer on demand."""

    def misses(is_on: bool) -> int:
        engine = load(target, slabs, "self:int8", num_slots=12)
        store = engine._runner.experts
        store.prefetch.draft_trial.is_on = is_on
        prefetch_pass = store.cache.prefetch_pass

        def prefetch_and_wait(numbers):
            prefetch_pass(numbers)
            with store.cache._changed:
                while store.cache._states.loads:
                    store.cache._loads.wait_for_load()

        store.cache.prefetch_pass = prefetch_and_wait
        answers(engine, [[5, 9, 200, 31, 7]], num_tokens=60)
        stats = engine._runner.experts.stats()
        engine.close()
        assert stats.is_prefetching == is_on
        return stats.expert_misses_total + stats.expert_late_total

    assert misses(is_on=True) < 0.85 * misses(is_on=False)


def test_experts_that_there_are_not_switch_the_speculator_off_and_no_request_notices(target, slabs, monkeypatch):
    plain = run(streamed_config(str(target[0]), slabs, 7, dtype="float32"))
    monkeypatch.setattr(RoutingAdvice, "experts_of", lambda self, _, hidden: [frozenset({999})] * len(hidden))
    engine = load(target, slabs, "self:int8")
    assert answers(engine) == (plain, {})
    assert engine._speculation._failed == {"self:int8"}
    engine.close()
