"""The meaning of `--speculator`: the models allowed to draft, their formats, and the memory counted for them."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace

import pytest

from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.vocabulary import read_vocabulary
from moeflow.cli.plan.output import plan_tables
from moeflow.core.errors import CapacityError, CheckpointError, ConfigError
from moeflow.core.units import GIB, MIB, format_bytes
from moeflow.kernels.cpu import extension
from moeflow.models.registry import read_model_config
from moeflow.planner.choices.draft_model_choice import KV_TOKENS
from moeflow.planner.hardware.host import host_resources
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.tiny_llama import write_tiny_llama
from tests.tiny_mixtral import write_tiny_mixtral


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    target, small = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("small")
    write_tiny_mixtral(target)
    write_tiny_llama(small)
    return target, small


def resolved(models, *speculators, **settings):
    here = replace(host_resources(), process_bytes=200 * MIB)  # this process may have grown by other tests
    return resolve(Settings(model=str(models[0]), speculators=speculators, **settings), resources=here)


def test_a_small_model_is_taken_in_the_fastest_format_or_the_one_named(models):
    config = resolved(models, "suffix", str(models[1]), f"{models[1]}:bfloat16").config
    assert config.speculators == ("suffix", str(models[1]), f"{models[1]}:bfloat16")
    fast, named = config.draft_models
    assert (fast.name, fast.model_path, fast.num_layers) == (str(models[1]), str(models[1]), 2)
    expected = ("int8", "int8") if extension.is_available() else ("float32", "float32")
    assert (fast.weight_format, fast.embedding_format) == expected
    assert named.weight_format == named.embedding_format == "bfloat16"


def test_the_model_itself_and_its_first_layers(models):
    own, early = resolved(models, "self:int8", "early-exit:1", "self:int8").config.draft_models
    assert own.model_path == str(models[0])
    assert own.weight_format == "int8"
    assert early.is_early_exit
    assert early.num_layers == 1
    assert early.num_bytes < own.num_bytes


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sufix", "sufix.*unknown.*suffix, early-exit, self:int8, dense-source"),
        ("no/such/model:int4", "unknown"),
        ("early-exit:2", "a number of layers from 1 to 1"),
        ("early-exit:none", "a number of layers"),
    ],
)
def test_what_there_is_not(models, name, message):
    with pytest.raises(ConfigError, match=message):
        resolved(models, name)


def test_a_folder_without_a_model_is_no_speculator(models, tmp_path):
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        resolved(models, str(tmp_path))


def test_models_draft_only_in_their_own_tokens(models, tmp_path):
    write_tiny_llama(tmp_path)
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    text = sorted(vocab, key=vocab.get)
    tokenizer["model"]["vocab"] = {token: place for place, token in enumerate([*text[:2], *text[:1:-1]])}
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"its tokenizer is another one.*same family"):
        resolved(models, str(tmp_path))


def test_the_vocabulary_is_the_tokenizers(models):
    assert read_vocabulary(models[0])["</s>"] == 1
    assert len(read_vocabulary(models[0])) == 258


def test_what_they_take_is_counted_and_explained(models):
    plain = resolved(models, memory_bytes=2 * GIB).config
    plan = resolved(models, f"{models[1]}:bfloat16", memory_bytes=2 * GIB).plan
    (draft,) = plan.config.draft_models
    with closing(open_checkpoint(models[1])) as checkpoint:
        shape = read_model_config(checkpoint)
        kv_bytes = draft.num_blocks * 16 * shape.kv_bytes_per_token(draft.kv_dtype)
        assert draft.num_bytes > kv_bytes + 2 * shape.num_parameters
    assert draft.num_blocks * 16 == min(KV_TOKENS, 512 * 32)
    assert plan.config.memory.process_bytes == plain.memory.process_bytes + draft.num_bytes
    assert f"{models[1]}:bfloat16: a model in bfloat16" in dict(plan.reasons)["speculators"]
    rows = [row[:3] for table in plan_tables(plan) for row in table.rows]
    assert ("speculator", f"{models[1].name}:bfloat16", f"{format_bytes(draft.num_bytes)} in memory") in rows


def test_where_they_cannot_draft(models, tmp_path):
    with pytest.raises(ConfigError, match=r"\(--ranks, --stages\)"):
        resolved(models, "early-exit", num_ranks=2)
    with pytest.raises(ConfigError, match=r"--record-routing"):
        resolved(models, "early-exit", record_routing=tmp_path / "routing")


@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
def test_one_that_leaves_no_room_for_the_model_is_named(models):
    resolved(models, memory_bytes=272 * MIB)
    with pytest.raises(CapacityError, match=r"MiB of it for models that draft: a smaller --speculator"):
        resolved(models, "self:int8", memory_bytes=272 * MIB)


@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
def test_the_first_layers_draft_where_experts_come_from_disk(models):
    assert resolved(models, "early-exit", memory_bytes=2**30).config.draft_models[0].is_early_exit


@pytest.mark.parametrize("ranks", [{}, {"num_ranks": 2}, {"stages": "2"}], ids=str)
def test_auto_takes_what_was_trained_also_where_ranks_compute(tmp_path, ranks):
    write_tiny_mixtral(tmp_path)
    write_tiny_llama(tmp_path / "speculators" / "1")
    chosen = resolved((tmp_path,), "auto", **ranks).config
    assert chosen.speculators == ("suffix", str(tmp_path / "speculators" / "1"))
    assert len(chosen.draft_models) == 1
