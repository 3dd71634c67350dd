"""A model's own sampling defaults: which its files give, and that `LLM` then answers as transformers does."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError, ConfigError
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.token_choice import TokenChoice
from moeflow.llm import LLM
from moeflow.models.sampling_defaults import read_sampling_defaults
from tests.checkpoint.tiny_models import HIDDEN, VOCAB, add_gguf_tensor, finish, gguf_writer
from tests.models.fake_checkpoint import FakeCheckpoint
from tests.tiny_mixtral import write_tiny_mixtral

PROMPT = list(range(40, 60))


def defaults_of(**generation_config: object) -> TokenChoice:
    checkpoint = FakeCheckpoint({}, {})
    checkpoint.generation_config = generation_config
    return read_sampling_defaults(checkpoint)


@pytest.mark.parametrize(
    ("generation_config", "changes"),
    [
        ({}, {}),
        ({"temperature": None, "top_k": None, "do_sample": None}, {}),
        ({"eos_token_id": 1, "typical_p": 0.5, "num_beams": 4}, {}),
        ({"temperature": 0.6, "do_sample": True}, {"temperature": 0.6}),
        ({"temperature": 0.6, "do_sample": False, "top_k": 20}, {"temperature": 0.0, "top_k": 20}),
        (
            {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.05},
            {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.05},
        ),
    ],
)
def test_what_the_file_says(generation_config, changes):
    assert defaults_of(**generation_config) == TokenChoice(**changes)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "warm"),
        ("temperature", 3.0),
        ("temperature", float("nan")),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 0.0),
        ("min_p", [0.1]),
        ("repetition_penalty", 0),
        ("do_sample", "no"),
    ],
)
def test_a_value_that_no_request_could_have_is_refused(key, value):
    with pytest.raises(CheckpointError, match=rf"generation_config\.json.*{key}.*--generation-config none"):
        defaults_of(**{key: value})


def test_gguf_metadata(tmp_path):
    file = tmp_path / "m.gguf"
    writer = gguf_writer(file, "llama")
    writer.add_float32(gguf.Keys.General.SAMPLING_TEMP, 0.7)
    writer.add_int32(gguf.Keys.General.SAMPLING_TOP_K, 20)
    writer.add_float32(gguf.Keys.General.SAMPLING_TOP_P, 0.8)
    writer.add_float32(gguf.Keys.General.SAMPLING_MIN_P, 0.05)
    writer.add_float32(gguf.Keys.General.SAMPLING_PENALTY_REPEAT, 1.05)
    add_gguf_tensor(writer, "token_embd.weight", torch.ones(VOCAB, HIDDEN))
    finish(writer)
    checkpoint = open_checkpoint(file)
    expected = TokenChoice(temperature=0.7, top_k=20, top_p=0.8, min_p=0.05, repetition_penalty=1.05)
    assert read_sampling_defaults(checkpoint) == expected
    checkpoint.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_mixtral(folder)
    generation = {"do_sample": False, "temperature": 0.9, "repetition_penalty": 1.5}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def transformers_tokens(folder: Path, **changes: object) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([PROMPT])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, pad_token_id=0, eos_token_id=None, **changes
    )
    return output[0, len(PROMPT) :].tolist()


def tokens(folder: Path, params: SamplingParams, **settings: str) -> list[int]:
    with LLM(folder, num_threads=1, kv_cache_bytes=2**20, **settings) as llm:
        return llm.generate([PROMPT], params, progress=False)[0].outputs[0].token_ids


def test_llm_answers_as_transformers_does_with_the_models_defaults(folder):
    expected = transformers_tokens(folder)
    assert expected != transformers_tokens(folder, repetition_penalty=1.0)  # else the oracle would show nothing
    assert tokens(folder, SamplingParams(max_tokens=24, ignore_eos=True)) == expected
    with LLM(folder, num_threads=1, kv_cache_bytes=2**20) as llm:
        (result,) = llm.generate([PROMPT], progress=False)
        assert result.outputs[0].token_ids == expected[: len(result.outputs[0].token_ids)]
        assert len(result.outputs[0].token_ids) == 16 or result.outputs[0].finish_reason == "stop"


def test_a_request_goes_before_the_models_defaults(folder):
    given = SamplingParams(max_tokens=24, ignore_eos=True, repetition_penalty=1.0)
    assert tokens(folder, given) == transformers_tokens(folder, repetition_penalty=1.0)


def test_the_models_defaults_can_be_ignored(folder, tmp_path):
    greedy = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
    found = tokens(folder, greedy, generation_config="none")
    assert found == transformers_tokens(folder, repetition_penalty=1.0)
    with pytest.raises(ConfigError, match="generation_config is 'vllm'; use one of auto, none"):
        tokens(folder, greedy, generation_config="vllm")


def test_a_bad_file_is_refused_unless_it_is_ignored(tmp_path):
    write_tiny_mixtral(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": -1}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: temperature must be a number from 0 to 2"):
        tokens(tmp_path, SamplingParams())
    assert tokens(tmp_path, SamplingParams(max_tokens=1), generation_config="none")
