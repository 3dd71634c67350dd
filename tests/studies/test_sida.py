"""The study of classifiers: what texts use, against transformers' routers; ways that must not change a bit; tables."""

from __future__ import annotations

import json
import math
from contextlib import closing

import numpy as np
import pytest
import torch
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersSparseMLP,
    SwitchTransformersTop1Router,
)

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import ConfigError, EngineError
from moeflow.engine import expert_store
from moeflow.kernels.cpu import extension
from moeflow.models.expert_predictor.network import ExpertPredictor, PredictorShape
from moeflow.models.expert_predictor.packed_network import for_serving
from moeflow.models.expert_predictor.saved import load_predictor, predictor_folder, save_predictor
from studies.sida import run as study_run
from studies.sida.arms import RESIDENT, TURN, WAYS, WholeLayers
from studies.sida.labels import read_texts
from studies.sida.permuted import derangement, permuted_experts
from studies.sida.run import SidaStudy
from studies.sida.tables import (
    WHOLE_LAYERS,
    best_on_demand,
    idle_shares,
    over_on_demand,
    over_whole_layers,
    rows_by_share,
    sida_tables,
    total_bytes,
)
from tests.studies import running
from tests.tiny_mixtral import write_tiny_mixtral
from tests.tiny_switch import LABELS, write_tiny_classifier

LAYERS, EXPERTS = 2, 6
SHAPE = PredictorShape(
    embedding_size=32, num_layers=LAYERS, num_experts=EXPERTS, top_k=1, hidden_size=16, window=64, is_causal=False
)
LINES = [f"{'a text of some words '[: 3 + number % 17]}{number}\t{LABELS[number % 3]}" for number in range(70)]

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


@pytest.fixture(autouse=True)
def quick_probe(monkeypatch):
    monkeypatch.setattr(expert_store, "probe_read_depth", lambda *_: 2)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """Return a classifier with a predictor that has learnt nothing, transformers' encoder and head, and texts."""
    folder = tmp_path_factory.mktemp("study")
    model = folder / "model"
    theirs = write_tiny_classifier(model, num_experts=EXPERTS)
    torch.manual_seed(5)
    with closing(open_checkpoint(model)) as checkpoint:
        save_predictor(ExpertPredictor(SHAPE), checkpoint, predictor_folder(model), {})
    data = folder / "dev.tsv"
    data.write_text("\n".join(LINES) + "\n")
    return model, data, theirs


@pytest.fixture
def study(classifier, tmp_path):
    model, data, _ = classifier
    with SidaStudy(model, data, num_texts=20, num_threads=1, cache_dir=tmp_path) as made:
        yield made


def choices_of_transformers(encoder, token_ids):
    """Return what each of transformers' routers chooses, [T, layers]."""
    chosen = []
    routers = [it for it in encoder.modules() if isinstance(it, SwitchTransformersTop1Router)]
    hooks = [it.register_forward_hook(lambda *args: chosen.append(args[2][0][0].argmax(-1))) for it in routers]
    with torch.no_grad():
        encoder(input_ids=torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1)


@pytest.mark.thorough
def test_what_texts_use_and_what_is_drafted(study, classifier):
    model, _, (encoder, _) = classifier
    found = study.usage_fields(lambda: None)
    with closing(open_checkpoint(model)) as checkpoint:
        predictor = for_serving(load_predictor(predictor_folder(model), checkpoint))
    used, hits, total = [], {1: 0, 3: 0}, 0
    for text in study.texts:
        chosen = choices_of_transformers(encoder, text)
        used.append(sum(len(set(of_layer.tolist())) for of_layer in chosen.unbind(1)))
        logits = predictor(encoder.shared(torch.tensor([text])))[0]
        for token, layer in np.ndindex(chosen.shape):
            ranked = logits[token, layer].argsort(descending=True).tolist()
            total += 1
            for number in hits:
                hits[number] += int(chosen[token, layer]) in ranked[:number]
    assert found["num_tokens"] == [len(text) for text in study.texts]
    assert found["used_experts"] == used
    assert found["hit_rates"] == {str(number): count / total for number, count in hits.items()}


@pytest.mark.thorough
def test_right_answers(study, classifier):
    _, _, (encoder, head) = classifier
    found = study.fidelity_fields(lambda: None)
    with torch.no_grad():
        states = [encoder(input_ids=torch.tensor([text])).last_hidden_state[0].mean(0) for text in study.texts]
        own = [int(head(state).argmax()) for state in states]
    assert found["own"]["right"] == pytest.approx(np.mean([own[at] == at % 3 for at in range(len(LINES))]))
    assert set(found) == {"own", "permuted", "sida", "sida:3"}


@pytest.mark.thorough
def test_all_ways_answer_alike_and_baselines_read_whole_layers(study):
    rows = study.rows(50, lossy_top_k=1, on_text=lambda: None)
    assert [row["way"] for row in rows] == [RESIDENT, *(way.name for way in WAYS)]
    read = {row["way"]: row["read_bytes_per_text"] / study.index.spec.slab_bytes for row in rows}
    assert read[RESIDENT] == 0
    slots, slabs = LAYERS * EXPERTS // 2, LAYERS * EXPERTS
    assert min(read["layer by layer"], read["layers ahead"]) >= slabs - slots
    assert all(len(row["text_s"]) == 20 for row in rows)


@pytest.mark.thorough
def test_a_way_that_changes_a_bit_is_an_error(study, monkeypatch):
    compute = WholeLayers.compute
    monkeypatch.setattr(WholeLayers, "compute", lambda *args: compute(*args) * 1.001)
    with pytest.raises(EngineError, match="layer by layer changed the probabilities"):
        study.rows(50, lossy_top_k=1, on_text=lambda: None)


@pytest.mark.thorough
def test_without_time_as_little_is_measured_as_can_be_and_of_all_the_same(study):
    done = []
    assert len(study.usage_fields(lambda: done.append(1), budget_s=0)["num_tokens"]) == 1
    assert study.fidelity_fields(lambda: done.append(1), budget_s=0)["own"]["num_texts"] == 1
    assert len(done) == 1 + 6
    rows = study.rows(50, lossy_top_k=3, on_text=lambda: done.append(1), budget_s=0)
    assert [len(row["text_s"]) for row in rows] == [TURN] * (1 + len(WAYS))
    assert len(done) == 1 + 6 + 2 * TURN * len(rows)


def test_labels_are_the_models_or_as_many(classifier, tmp_path):
    model, data, _ = classifier
    assert read_texts(data, model, LABELS).classes.tolist() == [number % 3 for number in range(len(LINES))]
    other = tmp_path / "other.tsv"
    other.write_text("one\t2\ntwo\t0\nthree\t1\n")
    assert read_texts(other, model, LABELS).classes.tolist() == [2, 0, 1]
    other.write_text("one\t2\ntwo\t0\n")
    with pytest.raises(ConfigError, match=r"has the labels 0, 2, and .* tells bad, fair, good apart"):
        read_texts(other, model, LABELS)


def test_a_command_measures_records_and_draws(classifier, tmp_path, monkeypatch):
    model, data, _ = classifier
    monkeypatch.setattr(study_run, "WARM_UP", 10)
    args = [str(model), "--data", str(data), "--share", "50", "--texts", "20", "--threads", "1"]
    args += ["--cache-dir", str(tmp_path), "--out", str(tmp_path / "out.jsonl"), "--plot", str(tmp_path / "p.png")]
    done = running.run("studies.sida", *args)
    assert done.exit_code == 0, done.output
    assert "50%, predicted, lossy" in done.output
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "out.jsonl").read_text())
    assert (record["model"], record["lossy"], record["num_experts"]) == ("model", "sida", EXPERTS)
    assert total_bytes(record) == record["dense_bytes"] + LAYERS * EXPERTS * record["slab_bytes"]
    assert idle_shares(record)[0] == 1 - record["usage"]["used_experts"][0] / (LAYERS * EXPERTS)
    rows = rows_by_share(record)[50]
    rates = {row["way"]: row["texts_per_s"] for row in rows}
    on_demand = {name: rate for name, rate in rates.items() if name.startswith("on demand")}
    assert {name.partition(", ")[2] for name in on_demand} == {"", "lru", "lfu", "next-use"}
    assert on_demand[best_on_demand(rows)] == max(on_demand.values())
    assert over_on_demand(rows, "predicted") == pytest.approx(rates["predicted"] / max(on_demand.values()))
    layers = [rates[name] for name in WHOLE_LAYERS]
    assert over_whole_layers(rows, "predicted") == pytest.approx(2 * rates["predicted"] / sum(layers))
    tables = sida_tables([record])
    assert [table.title.partition(" (")[0] for table in tables[:3]] == [
        "Gain from prediction",
        "Models and their texts",
        "Right answers and hit rates",
    ]
    assert tables[0].columns.index("lossy / on demand") < tables[0].columns.index("predicted / layers")
    record["answers"]["own"]["right"] = 0.0  # of a classifier that was never right there is no share
    assert len(sida_tables([record])) == 4


def test_permuted_experts_are_those_of_transformers(classifier, study):
    """Experts of transformers' layers change places; then all is as before."""
    _, _, (encoder, head) = classifier
    blocks = [block for _, block in study._resident.model.moe_blocks()]
    chance = torch.Generator().manual_seed(7)
    theirs = [it for it in encoder.modules() if isinstance(it, SwitchTransformersSparseMLP)]
    before = [dict(it.experts.items()) for it in theirs]
    for mlp, experts in zip(theirs, before, strict=True):
        for expert, place in enumerate(derangement(EXPERTS, chance).tolist()):
            assert place != expert
            mlp.experts[f"expert_{expert}"] = experts[f"expert_{place}"]
    own = study.fidelity_fields(lambda: None)["own"]
    with permuted_experts(blocks, 7):
        found = study._classes_of(study._resident, study.texts, lambda: None, math.inf)
    with torch.no_grad():
        states = [encoder(input_ids=torch.tensor([text])).last_hidden_state[0].mean(0) for text in study.texts]
        wanted = [int(head(state).argmax()) for state in states]
    for mlp, experts in zip(theirs, before, strict=True):
        for name, expert in experts.items():
            mlp.experts[name] = expert
    assert found.tolist() == wanted
    assert study.fidelity_fields(lambda: None)["own"] == own


def test_without_a_predictor_what_needs_none_is_measured(tmp_path, classifier):
    _, data, _ = classifier
    write_tiny_classifier(tmp_path / "bare", num_experts=EXPERTS)
    with SidaStudy(tmp_path / "bare", data, num_texts=10, num_threads=1, cache_dir=tmp_path) as made:
        assert made.usage_fields(lambda: None)["hit_rates"] is None
        assert set(made.fidelity_fields(lambda: None)) == {"own", "permuted"}
        assert [way.name for way in made.ways] == [way.name for way in WAYS if way.predictor == "none"]


def test_what_is_no_classifier_is_refused(tmp_path, classifier):
    model, data, _ = classifier
    with pytest.raises(ConfigError, match=r"has 70 texts, and 40 to warm up and 31 to measure are needed"):
        SidaStudy(model, data, num_texts=31, cache_dir=tmp_path)
    write_tiny_mixtral(tmp_path / "decoder")
    with pytest.raises(ConfigError, match=r"no classifier with experts.*moeflow train classifier"):
        SidaStudy(tmp_path / "decoder", data, num_texts=10, cache_dir=tmp_path)
