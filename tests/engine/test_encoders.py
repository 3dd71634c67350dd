"""Encoders without a decoder: transformers' states, classes, the same bits in any batch, and refused requests."""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing

import pytest
import torch

from moeflow import LLM
from moeflow.core.engine_config import ExpertSlotsConfig
from moeflow.core.engine_messages import NO_TOKENS, Submission
from moeflow.core.errors import CheckpointError, RequestError
from moeflow.core.pooling_params import PoolingParams
from moeflow.engine import expert_store
from moeflow.engine.engine import Engine
from moeflow.engine.pooling_choice import classification
from moeflow.kernels.cpu import extension
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.tiny_mixtral import write_tiny_mixtral
from tests.tiny_switch import LABELS, write_tiny_classifier, write_tiny_encoder

INPUTS = [[5, 9, 200, 31], list(range(2, 75)), [7], list(range(100, 140)), [9, 4] * 30]
RAW = PoolingParams(kind="mean", normalize=False)


def load(folder, **settings):
    return LLM(folder, **({"num_threads": 1, "max_model_len": 160} | settings))


def mean_state(encoder, token_ids):
    with torch.no_grad():
        return encoder(input_ids=torch.tensor([token_ids])).last_hidden_state[0].mean(0)


@pytest.mark.parametrize("is_t5", [False, True])
def test_vectors_are_those_of_transformers(tmp_path, is_t5):
    theirs = write_tiny_encoder(tmp_path, is_t5=is_t5)
    with load(tmp_path) as llm:
        assert llm.model.pooling == PoolingParams(kind="mean")
        found = llm.embed(INPUTS, RAW, progress=False)
    for vector, token_ids in zip(found, INPUTS, strict=True):
        torch.testing.assert_close(torch.tensor(vector), mean_state(theirs, token_ids), rtol=1e-4, atol=1e-4)


def test_classes_are_those_of_the_head_over_transformers_states(tmp_path):
    theirs, head = write_tiny_classifier(tmp_path)
    with load(tmp_path) as llm:
        assert llm.model.labels == LABELS
        found = llm.classify(INPUTS, progress=False)
    for probabilities, token_ids in zip(found, INPUTS, strict=True):
        expected = head(mean_state(theirs, token_ids)).softmax(0).detach()
        assert list(probabilities) == list(LABELS)
        torch.testing.assert_close(torch.tensor(list(probabilities.values())), expected, rtol=1e-4, atol=1e-4)


def test_the_same_bits_alone_and_beside_others(tmp_path):
    write_tiny_classifier(tmp_path)
    with load(tmp_path, max_num_seqs=3) as llm:
        together = llm.classify(INPUTS, progress=False)
        assert [llm.classify([one], progress=False)[0] for one in INPUTS] == together


@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
@pytest.mark.parametrize("num_slots", [2, 5])
def test_experts_come_from_disk(tmp_path, monkeypatch, num_slots):
    monkeypatch.setattr(expert_store, "probe_read_depth", lambda *_: 2)
    write_tiny_classifier(tmp_path)
    resident = resolve(Settings(model=str(tmp_path), num_threads=1, max_model_len=160)).config
    index = pack(str(tmp_path), tmp_path / "slabs", cache_dir=None)
    assert (index.spec.num_layers, index.spec.num_experts) == (2, 4)
    experts = ExpertSlotsConfig(
        packed_weights_file=str(tmp_path / "slabs"),
        num_slots=num_slots,
        slab_bytes=index.spec.slab_bytes,
        predictor="next-router",
    )
    assert classes(dataclasses.replace(resident, experts=experts)) == classes(resident)


def classes(config):
    """Return the engine's answers, by request."""
    with closing(Engine.load(config)) as engine:
        for number, token_ids in enumerate(INPUTS):
            asked = classification(engine.model)
            engine.submit(Submission(str(number), token_ids, NO_TOKENS, seed=0, pooling=asked))
        found = {}
        while engine.has_work:
            found |= {output.request_id: output.embedding for output in engine.step()}
            engine.check_integrity()
        return found


def test_what_an_encoder_does_not_do_is_refused(tmp_path):
    write_tiny_encoder(tmp_path)
    with load(tmp_path) as llm:
        with pytest.raises(RequestError, match=r"generates no text: ask for its vectors \(/v1/embeddings\)$"):
            llm.generate("hello", progress=False)
        with pytest.raises(RequestError, match=r"does not sort texts into classes.*moeflow train classifier"):
            llm.classify("hello", progress=False)


def test_decoders_have_no_classes(tmp_path):
    write_tiny_mixtral(tmp_path)
    with load(tmp_path) as llm, pytest.raises(RequestError, match="does not sort texts into classes"):
        llm.classify("hello", progress=False)


@pytest.mark.parametrize("labels", [None, {}, {"0": "only"}, {"0": "a", "2": "b"}, {"0": 1, "1": 2}, ["a", "b"]])
def test_labels_that_are_none_are_refused(tmp_path, labels):
    write_tiny_classifier(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"id2label": labels}))
    with pytest.raises(CheckpointError, match=r"'id2label' is .*names of two or more classes"):
        load(tmp_path)
