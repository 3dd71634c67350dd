"""Vectors of prompts: those of transformers' hidden states, and the same bits however a prompt is computed."""

from __future__ import annotations

import json

import pytest
import torch

from moeflow import LLM
from moeflow.checkpoint.pooling_files import read_pooling
from moeflow.core.errors import CheckpointError, RequestError
from moeflow.core.pooling_params import PoolingParams
from moeflow.core.sampling_params import SamplingParams
from tests.tiny_mixtral import write_tiny_mixtral
from tests.tiny_switch import write_tiny_switch

PROMPTS = [[5, 6, 7], list(range(2, 90)), [200], [9] * 33]
KINDS = ["last", "mean", "first"]


def pooled(hidden, kind):
    return {"last": hidden[-1], "mean": hidden.mean(0), "first": hidden[0]}[kind]


@pytest.fixture(scope="module", params=["mixtral", "switch"])
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    theirs = write_tiny_mixtral(folder).model if request.param == "mixtral" else write_tiny_switch(folder).encoder
    return theirs, folder


def load(folder, **settings):
    return LLM(folder, num_threads=1, max_model_len=160, **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_transformers(made, kind):
    theirs, folder = made
    with load(folder) as llm:
        raw = llm.embed(PROMPTS, PoolingParams(kind=kind, normalize=False), progress=False)
        unit = llm.embed(PROMPTS, PoolingParams(kind=kind), progress=False)
        short = llm.embed(PROMPTS, PoolingParams(kind=kind, dimensions=7), progress=False)
    for prompt, numbers, of_length_1, first in zip(PROMPTS, raw, unit, short, strict=True):
        with torch.no_grad():
            expected = pooled(theirs(input_ids=torch.tensor([prompt])).last_hidden_state[0], kind)
        torch.testing.assert_close(torch.tensor(numbers), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.tensor(of_length_1), expected / expected.norm(), rtol=1e-4, atol=1e-4)
        cut = expected[:7]
        torch.testing.assert_close(torch.tensor(first), cut / cut.norm(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_alone_in_chunks_and_beside_answers(tmp_path, kind):
    write_tiny_mixtral(tmp_path)
    pooling = PoolingParams(kind=kind)
    with load(tmp_path) as llm:
        together = llm.embed(PROMPTS, pooling, progress=False)
        assert llm.embed(PROMPTS, pooling, progress=False) == together  # with prefixes that are cached
        assert [llm.embed([prompt], pooling, progress=False)[0] for prompt in PROMPTS] == together
        answer = llm.generate([PROMPTS[1]], SamplingParams(max_tokens=3, temperature=0), progress=False)
        assert len(answer[0].outputs[0].token_ids) == 3
    with load(tmp_path, max_num_batched_tokens=16, max_num_seqs=2) as llm:
        assert llm.embed(PROMPTS, pooling, progress=False) == together


def test_what_has_no_vector_is_refused_before_anything_runs(tmp_path):
    write_tiny_mixtral(tmp_path)
    with load(tmp_path) as llm:
        with pytest.raises(RequestError, match="33"):
            llm.embed([[5]], PoolingParams(dimensions=33), progress=False)
        with pytest.raises(RequestError, match="empty"):
            llm.embed([[5], []], progress=False)
        with pytest.raises(RequestError, match="context"):
            llm.embed([[5], [6] * 161], progress=False)
        with pytest.raises(RequestError, match="pooling must be one of"):
            PoolingParams(kind="max")


def write_modules(folder, names, pooling):
    modules = [
        {"idx": number, "name": str(number), "path": f"{number}_{name}", "type": f"sentence_transformers.models.{name}"}
        for number, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def test_files_of_sentence_transformers_say_how(tmp_path):
    assert read_pooling(tmp_path) is None
    write_modules(
        tmp_path,
        ["Transformer", "Pooling", "Normalize"],
        {"pooling_mode_mean_tokens": True},
    )
    assert read_pooling(tmp_path) == PoolingParams(kind="mean")
    write_modules(tmp_path, ["Transformer", "Pooling"], {"pooling_mode_lasttoken": True})
    assert read_pooling(tmp_path) == PoolingParams(kind="last", normalize=False)
    for names, pooling in (
        (["Transformer", "Pooling", "Dense"], {"pooling_mode_lasttoken": True}),
        (["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}),
        (["Transformer", "Pooling"], {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}),
    ):
        write_modules(tmp_path, names, pooling)
        with pytest.raises(CheckpointError, match="pooling"):
            read_pooling(tmp_path)
