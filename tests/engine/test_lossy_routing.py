"""A predictor in place of an encoder's routers: transformers' layers with its choice, and the reports of it."""

from __future__ import annotations

import dataclasses
from contextlib import closing

import pytest
import torch
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

from moeflow import LLM
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.engine_config import ExpertSlotsConfig
from moeflow.core.errors import ConfigError
from moeflow.engine import expert_store
from moeflow.kernels.cpu import extension
from moeflow.models.expert_predictor.network import ExpertPredictor, PredictorShape
from moeflow.models.expert_predictor.packed_network import for_serving
from moeflow.models.expert_predictor.saved import load_predictor, predictor_folder, save_predictor
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.engine.test_encoders import INPUTS, classes, mean_state
from tests.tiny_mixtral import write_tiny_mixtral
from tests.tiny_switch import write_tiny_classifier

LAYERS, EXPERTS = 2, 4
SHAPE = PredictorShape(
    embedding_size=32, num_layers=LAYERS, num_experts=EXPERTS, top_k=1, hidden_size=16, window=32, is_causal=False
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Return a classifier with a predictor that has learnt nothing, and transformers' own with its head."""
    folder = tmp_path_factory.mktemp("target")
    theirs = write_tiny_classifier(folder, num_experts=EXPERTS)
    torch.manual_seed(3)
    predictor = ExpertPredictor(SHAPE)
    with torch.no_grad():
        predictor.heads.weight.mul_(9)  # choices that differ from token to token
    with closing(open_checkpoint(folder)) as checkpoint:
        save_predictor(predictor, checkpoint, predictor_folder(folder), {})
    return folder, *theirs


class Given(torch.nn.Module):
    """Adds up chosen experts of a layer with given weights, one token after another."""

    def __init__(self, experts, ids, weights):
        super().__init__()
        self.experts, self.ids, self.weights = experts, ids, weights

    def forward(self, hidden_states):
        rows = [
            sum(
                float(weight) * self.experts[f"expert_{int(expert)}"](row)
                for expert, weight in zip(*choice, strict=True)
            )
            for row, *choice in zip(hidden_states[0], self.ids, self.weights, strict=True)
        ]
        return torch.stack(rows)[None]


@torch.no_grad()
def expected(folder, encoder, head, token_ids, top_k):
    """Return the probabilities of transformers' encoder with what the predictor chooses."""
    with closing(open_checkpoint(folder)) as checkpoint:
        predictor = for_serving(load_predictor(predictor_folder(folder), checkpoint))
    alpha, ids = predictor(encoder.shared(torch.tensor([token_ids])))[0].softmax(-1).topk(top_k, dim=-1)
    blocks = [block.layer[-1] for block in encoder.encoder.block if block.layer[-1].is_sparse]
    assert len(blocks) == LAYERS
    own = [block.mlp for block in blocks]
    assert all(isinstance(mlp, SwitchTransformersSparseMLP) for mlp in own)
    try:
        for layer, (block, mlp) in enumerate(zip(blocks, own, strict=True)):
            block.mlp = Given(mlp.experts, ids[:, layer], alpha[:, layer])
        return head(mean_state(encoder, token_ids)).softmax(0)
    finally:
        for block, mlp in zip(blocks, own, strict=True):
            block.mlp = mlp


@pytest.mark.parametrize(("name", "top_k"), [("sida", 1), ("sida:3", 3)])
def test_the_predictor_chooses(target, name, top_k):
    folder, encoder, head = target
    with LLM(folder, num_threads=1, max_model_len=160, max_num_seqs=3, lossy_routing=name) as llm:
        assert llm.model.name == f"{folder.name}:lossy-{name}"
        assert llm.model.lossy_top_k == top_k
        found = llm.classify(INPUTS, progress=False)
        assert [llm.classify([one], progress=False)[0] for one in INPUTS] == found
    with LLM(folder, num_threads=1, max_model_len=160) as llm:
        assert llm.classify(INPUTS, progress=False) != found
    for probabilities, token_ids in zip(found, INPUTS, strict=True):
        wanted = expected(folder, encoder, head, token_ids, top_k)
        torch.testing.assert_close(torch.tensor(list(probabilities.values())), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
@pytest.mark.parametrize("predictor", ["sida", "none"])
@pytest.mark.parametrize("num_slots", [2, 5])
def test_the_same_bits_from_disk(target, tmp_path, monkeypatch, num_slots, predictor):
    monkeypatch.setattr(expert_store, "probe_read_depth", lambda *_: 2)
    folder, *_ = target
    settings = Settings(model=str(folder), num_threads=1, max_model_len=160, lossy_routing="sida:3")
    resident = resolve(settings).config
    index = pack(str(folder), tmp_path / "slabs", cache_dir=None)
    experts = ExpertSlotsConfig(
        packed_weights_file=str(tmp_path / "slabs"),
        num_slots=num_slots,
        slab_bytes=index.spec.slab_bytes,
        predictor=predictor,
    )
    assert classes(dataclasses.replace(resident, experts=experts)) == classes(resident)


def test_a_plan_has_it(target):
    folder, *_ = target
    assert resolve(Settings(model=str(folder), lossy_routing="sida:3")).config.lossy_top_k == 3


def test_what_cannot_be_is_refused(target, tmp_path):
    folder, *_ = target
    write_tiny_mixtral(tmp_path / "decoder")
    with pytest.raises(ConfigError, match=r"--lossy-routing sida:3 needs 6 experts a layer.*mixtral model has 4"):
        resolve(Settings(model=str(tmp_path / "decoder"), lossy_routing="sida:3"))
    write_tiny_classifier(tmp_path / "untrained", num_experts=EXPERTS)
    with pytest.raises(ConfigError, match=r"no predictor.*moeflow train predictor.*remove --lossy-routing"):
        resolve(Settings(model=str(tmp_path / "untrained"), lossy_routing="sida"))
    with pytest.raises(ConfigError, match="lossy_routing 'sida:9' is unknown; use one of sida, sida:3"):
        resolve(Settings(model=str(folder), lossy_routing="sida:9"))
