"""GGUF metadata as config.json: required and refused keys, and stretched positions."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError
from tests.checkpoint.tiny_models import HEADS, HIDDEN, VOCAB, add_gguf_tensor, finish, gguf_writer

HEAD_DIM = HIDDEN // HEADS


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "model.gguf"


def write(writer: gguf.GGUFWriter, file: Path, rope_factors: torch.Tensor | None = None) -> Path:
    add_gguf_tensor(writer, "token_embd.weight", torch.ones(VOCAB, HIDDEN))
    if rope_factors is not None:
        add_gguf_tensor(writer, "rope_freqs.weight", rope_factors)
    finish(writer)
    return file


def refused(file: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(file)
    assert caught.value.file == str(file)
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "setter", "key"),
    [
        ("llama", "add_context_length", "context_length"),
        ("llama", "add_embedding_length", "embedding_length"),
        ("llama", "add_block_count", "block_count"),
        ("llama", "add_feed_forward_length", "feed_forward_length"),
        ("llama", "add_head_count", "attention.head_count"),
        ("llama", "add_layer_norm_rms_eps", "attention.layer_norm_rms_epsilon"),
        ("mixtral", "add_expert_used_count", "expert_used_count"),
        ("qwen3_moe", "add_expert_count", "expert_count"),
        ("qwen3_moe", "add_expert_feed_forward_length", "expert_feed_forward_length"),
    ],
)
def test_missing_key(file, family, setter, key):
    write(gguf_writer(file, family, skip=(setter,)), file)
    assert f"has no '{key}'" in refused(file)


def test_no_architecture(file):
    write(gguf_writer(file, "llama"), file)
    file.write_bytes(file.read_bytes().replace(b"general.architecture", b"general.architektur!"))
    assert "'general.architecture'" in refused(file)


def test_defaults(file):
    skip = ("add_head_count_kv", "add_key_length", "add_rope_freq_base", "add_vocab_size", "add_bos_token_id")
    config = open_checkpoint(write(gguf_writer(file, "llama", skip=skip), file)).config
    assert config["num_key_value_heads"] == HEADS
    assert config["head_dim"] == HEAD_DIM
    assert config["rope_theta"] == 10000.0
    assert config["vocab_size"] == VOCAB
    assert config["rope_scaling"] is None
    assert "bos_token_id" not in config


def test_a_key_of_the_wrong_type(file):
    writer = gguf_writer(file, "llama", skip=("add_head_count_kv",))
    writer.add_array("llama.attention.head_count_kv", [2, 4])
    assert "where int is expected" in refused(write(writer, file))


def test_tokens_of_minus_one_are_none(file):
    writer = gguf_writer(file, "llama")
    writer.add_eot_token_id(2**32 - 1)
    writer.add_pad_token_id(2**32 - 1)
    assert open_checkpoint(write(writer, file)).generation_config == {"bos_token_id": 1, "eos_token_id": 2}


def test_several_ends_of_turn(file):
    writer = gguf_writer(file, "llama")
    writer.add_eot_token_id(7)
    writer.add_uint32("tokenizer.ggml.eom_token_id", 2)
    writer.add_pad_token_id(0)
    checkpoint = open_checkpoint(write(writer, file))
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": 0}
    assert checkpoint.config["eos_token_id"] == [2, 7]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.clamp_kqv", 8.0),
        ("attention.sliding_window", 64),
        ("expert_gating_func", 2),
        ("expert_weights_scale", 2.5),
        ("expert_shared_count", 1),
        ("logit_scale", 0.5),
        ("rope.dimension_count", HEAD_DIM // 2),
        ("attention.value_length", HEAD_DIM * 2),
    ],
)
def test_arithmetic_that_models_do_not_have(file, key, value):
    writer = gguf_writer(file, "olmoe")
    add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
    add(f"olmoe.{key}", value)
    message = refused(write(writer, file))
    assert f"'{key}' is {value}" in message
    assert "not supported" in message


class TestRope:
    def test_linear(self, file):
        writer = gguf_writer(file, "llama")
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)
        config = open_checkpoint(write(writer, file)).config
        assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}

    def test_none(self, file):
        writer = gguf_writer(file, "llama")
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(4.0)
        assert open_checkpoint(write(writer, file)).config["rope_scaling"] is None

    def test_yarn(self, file):
        writer = gguf_writer(file, "qwen3_moe")
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)
        assert open_checkpoint(write(writer, file)).config["rope_scaling"] == {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        }

    def test_longrope(self, file):
        writer = gguf_writer(file, "llama")
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_factor(4.0)
        assert "'longrope'" in refused(write(writer, file))

    def test_no_positive_base(self, file):
        writer = gguf_writer(file, "llama", skip=("add_rope_freq_base",))
        writer.add_rope_freq_base(-1.0)
        assert "rope.freq_base" in refused(write(writer, file))

    @pytest.mark.parametrize("factor", [8.0, 32.0])
    def test_llama3_settings_are_found_in_the_table(self, file, factor):
        """The table is what transformers' own implementation divides the frequencies by."""
        scaling = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        config = LlamaConfig(
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            head_dim=HEAD_DIM,
            max_position_embeddings=131072,
            rope_parameters=scaling | {"rope_theta": 500000.0},
        )
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = 500000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        assert len({round(value, 3) for value in (plain / frequencies).tolist()}) > 2  # some lie in between
        writer = gguf_writer(file, "llama", skip=("add_rope_freq_base",))
        writer.add_rope_freq_base(500000.0)
        checkpoint = open_checkpoint(write(writer, file, plain / frequencies))
        assert checkpoint.config["rope_scaling"] == pytest.approx(scaling)
        assert "rope_freqs" not in "".join(checkpoint.tensors)

    def test_table_of_ones(self, file):
        table = torch.ones(HEAD_DIM // 2)
        assert open_checkpoint(write(gguf_writer(file, "llama"), file, table)).config["rope_scaling"] is None

    @pytest.mark.parametrize("value", [3.0, 0.0, -1.0, float("inf"), float("nan")])
    def test_other_tables(self, file, value):
        table = torch.ones(HEAD_DIM // 2)
        table[2] = value
        assert "not Llama 3's" in refused(write(gguf_writer(file, "llama"), file, table))

    def test_nothing_but_a_table(self, file):
        writer = gguf_writer(file, "llama")
        add_gguf_tensor(writer, "rope_freqs.weight", torch.ones(HEAD_DIM // 2))
        finish(writer)
        assert "holds no weights" in refused(file)

    def test_table_of_another_length(self, file):
        message = refused(write(gguf_writer(file, "llama"), file, torch.ones(5)))
        assert "tensor rope_freqs.weight: has the shape [5]" in message
