"""A predictor in place of a decoder's routers: torch's own layers with the predictor's choice, token by token."""

from __future__ import annotations

import dataclasses
import shutil
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moeflow import LLM, SamplingParams
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.engine_config import ExpertSlotsConfig
from moeflow.core.errors import ConfigError
from moeflow.engine import expert_store
from moeflow.engine.engine import Engine
from moeflow.engine.lossy_routing import TextChoices
from moeflow.engine.prompt_cache.identity import kv_identity
from moeflow.kernels.cpu import extension
from moeflow.kernels.routing import Routing
from moeflow.models.expert_predictor.network import ExpertPredictor, PredictorShape
from moeflow.models.expert_predictor.packed_network import for_serving
from moeflow.models.expert_predictor.saved import folders_of, load_predictor, save_predictor
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.engine.streamed_runs import answers as answers_of
from tests.engine.streamed_runs import follow_all, run
from tests.tiny_mixtral import write_tiny_mixtral
from tests.tiny_switch import write_tiny_switch

EXPERTS, TOP_K, NEW_TOKENS = 8, 2, 8
SIZES = {"embedding_size": 32, "num_experts": EXPERTS, "hidden_size": 16, "window": 4}
PROMPTS = [[60, 71, 82, 93, 44], [*range(5, 60)], [7, 7, 9]]  # the second is longer than a block
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


def with_predictors(folder, *shapes):
    """Save predictors that have learnt nothing, and return them."""
    torch.manual_seed(3)
    found = []
    with closing(open_checkpoint(folder)) as checkpoint:
        for shape, place in zip(shapes, folders_of(folder), strict=False):
            predictor = ExpertPredictor(shape)
            with torch.no_grad():
                predictor.heads.weight.mul_(9)  # choices that differ from token to token
            save_predictor(predictor, checkpoint, place, {})
            found.append(for_serving(load_predictor(place, checkpoint)))
    return found


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoder")
    theirs = write_tiny_mixtral(folder, num_local_experts=EXPERTS)
    return folder, theirs, *with_predictors(folder, PredictorShape(num_layers=2, top_k=TOP_K, **SIZES))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    theirs = write_tiny_switch(folder, num_experts=EXPERTS)
    of_encoder = PredictorShape(num_layers=2, top_k=1, is_causal=False, **SIZES)
    return folder, theirs, *with_predictors(folder, of_encoder, PredictorShape(num_layers=1, top_k=1, **SIZES))


def settings_of(folder, **changes):
    return {"model": str(folder), "num_threads": 1, "max_model_len": 128, "dtype": "float32"} | changes


def answers(folder, prompts, **changes):
    with LLM(**settings_of(folder, max_num_seqs=3, lossy_routing="sida") | changes) as llm:
        return [found.outputs[0].token_ids for found in llm.generate(prompts, GREEDY, progress=False)]


@torch.no_grad()
def mixtral_answer(model, predictor, prompt, num_chosen):
    """Return transformers' greedy tokens, the whole text anew for each, with the predictor's choice in its gates."""
    text = list(prompt)
    gates = [layer.mlp.gate for layer in model.model.layers]
    for _ in range(NEW_TOKENS):
        logits = predictor(model.model.embed_tokens(torch.tensor([text])))[0]
        for layer, gate in enumerate(gates):
            weights, ids = logits[:, layer].softmax(-1).topk(num_chosen, dim=-1)
            gate.forward = lambda _, ids=ids, weights=weights: (None, weights / weights.sum(-1, keepdim=True), ids)
        text.append(int(model(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
    for gate in gates:
        del gate.forward
    return text[len(prompt) :]


@torch.no_grad()
def switch_answer(model, of_encoder, of_decoder, prompt, num_chosen):
    """Return the same of an encoder-decoder."""
    own, sparse = [0], [block.layer[-1].mlp for block in [*model.encoder.block, *model.decoder.block]]
    sparse = [mlp for mlp in sparse if hasattr(mlp, "router")]
    for _ in range(NEW_TOKENS):
        of_input, of_text = (
            predictor(model.shared(torch.tensor([text])))[0].softmax(-1)
            for predictor, text in ((of_encoder, prompt), (of_decoder, prompt + own))
        )
        layers = [*of_input.unbind(1), of_text[len(prompt) :, 0]]
        for mlp, probabilities in zip(sparse, layers, strict=True):
            mlp.forward = lambda hidden, mlp=mlp, rows=probabilities: sum_of_chosen(
                mlp.experts, hidden, rows, num_chosen
            )
        logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([own])).logits
        own.append(int(logits[0, -1].argmax()))
    for mlp in sparse:
        del mlp.forward
    return own[1:]


def sum_of_chosen(experts, hidden, probabilities, num_chosen):
    alpha, ids = probabilities.topk(num_chosen, dim=-1)
    rows = [
        sum(float(weight) * experts[f"expert_{int(expert)}"](row) for expert, weight in zip(*choice, strict=True))
        for row, *choice in zip(hidden[0], ids, alpha, strict=True)
    ]
    return torch.stack(rows)[None]


@pytest.mark.parametrize(("name", "times"), [("sida", 1), ("sida:3", 3)])
def test_the_predictor_chooses_for_a_decoder_only_model(decoder, name, times):
    folder, model, predictor = decoder
    found = answers(folder, PROMPTS, lossy_routing=name)
    assert found == [mixtral_answer(model, predictor, prompt, times * TOP_K) for prompt in PROMPTS]
    assert found != answers(folder, PROMPTS, lossy_routing=None)


@pytest.mark.parametrize(("name", "times"), [("sida", 1), ("sida:3", 3)])
def test_the_predictors_choose_for_an_encoder_and_its_decoder(pair, name, times):
    folder, model, *predictors = pair
    found = answers(folder, PROMPTS, lossy_routing=name)
    assert found == [switch_answer(model, *predictors, prompt, times) for prompt in PROMPTS]


def test_answers_depend_on_the_text_alone(decoder):
    folder, *_ = decoder
    found = answers(folder, PROMPTS)
    assert [answers(folder, [prompt])[0] for prompt in PROMPTS] == found
    assert answers(folder, PROMPTS, max_num_batched_tokens=16) == found
    text = PROMPTS[1] + found[1]
    with LLM(**settings_of(folder, max_num_seqs=3, lossy_routing="sida")) as llm:
        first, again = (llm.generate([text], GREEDY, progress=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, again.num_cached_tokens > 16) == (0, True)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
@pytest.mark.parametrize(
    ("model", "predictor"),
    [("decoder", "sida"), ("decoder", "none"), ("pair", "sida"), ("pair", "none"), ("pair", "combined")],
)
def test_the_same_tokens_from_disk(request, tmp_path, monkeypatch, model, predictor):
    monkeypatch.setattr(expert_store, "probe_read_depth", lambda *_: 2)
    folder, *_ = request.getfixturevalue(model)
    config = resolve(Settings(**settings_of(folder, max_num_seqs=3, lossy_routing="sida"))).config
    index = pack(str(folder), tmp_path / "slabs", cache_dir=None)
    slots = ExpertSlotsConfig(
        packed_weights_file=str(tmp_path / "slabs"),
        num_slots=6,
        slab_bytes=index.spec.slab_bytes,
        predictor=predictor,
    )
    with closing(Engine.load(dataclasses.replace(config, experts=slots))) as engine:
        follow_all(engine._runner.experts.prefetch)
        assert answers_of(engine, PROMPTS) == (run(config, PROMPTS), {})


def test_stored_keys_and_values_of_one_network_are_not_those_of_another(decoder, tmp_path):
    folder, *_ = decoder
    config = resolve(Settings(**settings_of(folder, lossy_routing="sida"))).config
    other = Path(shutil.copytree(folder, tmp_path / "model"))
    save = dataclasses.replace(config, model_path=str(other))
    assert kv_identity(save) == kv_identity(save)
    assert kv_identity(dataclasses.replace(save, lossy_top_k=0)) != kv_identity(save)
    before = kv_identity(save)
    weights = next((other / "predictor").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-4] + b"else")
    assert kv_identity(save) != before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_ranks": 2}, "--lossy-routing does not go with --ranks"),
        ({"stages": "2"}, "--lossy-routing does not go with --stages"),
        ({"speculators": ("suffix",)}, "--lossy-routing does not go with --speculator"),
    ],
)
def test_settings_whose_tokens_the_network_does_not_see_are_refused(decoder, changes, words):
    with pytest.raises(ConfigError, match=words):
        resolve(Settings(**settings_of(decoder[0], lossy_routing="sida", **changes)))


def test_routers_that_do_not_choose_by_a_softmax_are_refused():
    texts = SimpleNamespace()
    for rule in (Routing(2, score="sigmoid"), Routing(2, num_groups=2), Routing(2, choice_bias=torch.zeros(8))):
        with pytest.raises(ConfigError, match=r"by a softmax alone.*remove it"):
            TextChoices(texts, [rule], top_k=2)


def test_a_decoder_without_a_network_is_refused(tmp_path):
    write_tiny_switch(tmp_path, num_experts=EXPERTS)
    with_predictors(tmp_path, PredictorShape(num_layers=2, top_k=1, is_causal=False, **SIZES))
    with pytest.raises(
        ConfigError, match=r"no predictor of this model's experts in .*decoder.*moeflow train predictor"
    ):
        resolve(Settings(**settings_of(tmp_path, lossy_routing="sida")))
