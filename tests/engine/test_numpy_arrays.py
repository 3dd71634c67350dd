"""A packed model gives the same bits on NumPy's arrays and on torch's tensors."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DbrxConfig,
    DeepseekV2Config,
    Ernie4_5_MoeConfig,
    Gemma4TextConfig,
    Lfm2Config,
    LlamaConfig,
    OlmoeConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from moeflow.checkpoint.packed.large_pages import LargePages
from moeflow.core.engine_messages import Submission
from moeflow.core.pooling_params import PoolingParams
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine import compute_setup
from moeflow.engine.engine import Engine
from moeflow.engine.model_runner import ModelRunner
from moeflow.kernels.cpu import extension
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.engine.submissions import run, submission
from tests.models import test_gemma4_text
from tests.models.parity import SHAPE
from tests.tiny_mixtral import write_byte_tokenizer, write_tiny_mixtral

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())

FORMATS = [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantize": "int8"}, {"quantize": "int4"}]
SYSTEM = list(range(10, 58))  # three whole blocks, which prompts share
SUBMISSIONS = [
    submission("greedy", [*SYSTEM, 5, 9], max_tokens=20, logprobs=3),
    submission("again", [*SYSTEM, 5, 77], max_tokens=30),
    submission("sampled", [100, 3], temperature=0.9, seed=7, logprobs=0, max_tokens=40),
    submission("top", [8, 8, 8], temperature=1.5, top_k=20, top_p=0.8, min_p=0.01, seed=3, logprobs=20, max_tokens=40),
    submission("edited", [4, 4, 9], repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    submission("biased", [9], temperature=0.7, logit_bias={7: 4.0, 8: -100.0}, min_tokens=3, ignore_eos=False, seed=2),
    submission("scored", list(range(20, 90)), prompt_logprobs=2, max_tokens=2),
    Submission("vector", list(range(30, 60)), SamplingParams(max_tokens=1), 0, pooling=PoolingParams(kind="mean")),
]


def config_of(model, cache_dir, *, scheduler=None, **settings):
    config = resolve(
        Settings(
            model=str(model), num_threads=1, kv_cache_bytes=2**20, max_model_len=128, cache_dir=cache_dir, **settings
        )
    ).plan.config
    assert config.packed_file
    return replace(config, scheduler=replace(config.scheduler, **(scheduler or {})))


def answers(config, runs_on_numpy, monkeypatch, *, asks_for_torch=False):
    with monkeypatch.context() as patched:
        if asks_for_torch:  # whatever the configuration says
            patched.setattr(compute_setup, "needs_torch", lambda _: True)
        with closing(Engine.load(config)) as engine:
            assert isinstance(engine._runner, ModelRunner)
            assert isinstance(engine._runner.model.norm.weight, np.ndarray) is runs_on_numpy
            for each in SUBMISSIONS:
                engine.submit(each)
            found = run(engine)
            stats = engine.stats()
    timeless = {
        name: [msgspec.structs.replace(output, queued_s=None, num_drafted_tokens=0) for output in outputs]
        for name, outputs in found.items()
    }
    return timeless, stats


def check(config, monkeypatch):
    ours, stats = answers(config, True, monkeypatch)
    theirs, _ = answers(config, False, monkeypatch, asks_for_torch=True)
    assert ours == theirs
    assert set(ours) == {each.request_id for each in SUBMISSIONS}
    return stats


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtral")
    write_tiny_mixtral(folder / "model")
    for formats in FORMATS:
        pack(str(folder / "model"), None, cache_dir=folder, **formats)
    return folder


@pytest.mark.parametrize("formats", FORMATS, ids=lambda it: "".join(it.values()))
def test_in_every_format(mixtral, formats, monkeypatch):
    check(config_of(mixtral / "model", mixtral, **formats), monkeypatch)


def test_in_chunks_with_blocks_that_run_out(mixtral, monkeypatch):
    scheduler = {"num_blocks": 8, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    stats = check(config_of(mixtral / "model", mixtral, dtype="float32", scheduler=scheduler), monkeypatch)
    assert stats.preemptions_total > 0
    assert stats.prefix_hit_tokens_total > 0


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_with_narrow_keys_and_values(mixtral, kv_dtype, monkeypatch):
    check(config_of(mixtral / "model", mixtral, dtype="bfloat16", kv_dtype=kv_dtype), monkeypatch)


def test_with_drafts(mixtral, monkeypatch):  # how many there are goes by the time of passes
    check(config_of(mixtral / "model", mixtral, dtype="float32", speculators=("suffix",)), monkeypatch)


def test_while_routing_is_recorded(mixtral, tmp_path, monkeypatch):
    file = tmp_path / "trace"
    config = config_of(mixtral / "model", mixtral, dtype="float32")
    traces = []
    for asks_for_torch in (False, True):
        recorded = replace(config, record_routing=str(file))
        answers(recorded, not asks_for_torch, monkeypatch, asks_for_torch=asks_for_torch)
        traces.append(file.stat().st_size)
        file.unlink()
    assert traces[0] == traces[1] > 0


def test_its_pages_are_looked_after_while_the_engine_lives(mixtral, monkeypatch):
    seen = []
    monkeypatch.setattr(LargePages, "begin", lambda _: seen.append("begun"))
    monkeypatch.setattr(LargePages, "close", lambda _: seen.append("ended"))
    with closing(Engine.load(config_of(mixtral / "model", mixtral, quantize="int8"))):
        assert seen == ["begun"]
    assert seen == ["begun", "ended"]


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 64}
MOE = SHAPE | {"vocab_size": 258, "num_experts": 6, "num_experts_per_tok": 3}
FAMILIES = {
    "dense": LlamaConfig(**SHAPE | {"vocab_size": 258}, attention_bias=True, rope_parameters=LLAMA3),
    "dense, with biases of its networks": LlamaConfig(**SHAPE | {"vocab_size": 258}, mlp_bias=True),
    "norms of heads": Qwen3MoeConfig(**MOE, moe_intermediate_size=24, head_dim=16, mlp_only_layers=[1]),
    "a window": Qwen3MoeConfig(
        **MOE,
        moe_intermediate_size=24,
        head_dim=16,
        attention_bias=True,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=9,
        rope_parameters=YARN,
    ),
    "a shared expert with a gate": Qwen2MoeConfig(
        **MOE, moe_intermediate_size=24, shared_expert_intermediate_size=40, norm_topk_prob=True
    ),
    "a bias of the choice, rotated neighbours": Ernie4_5_MoeConfig(
        **SHAPE | {"vocab_size": 258}, moe_num_experts=6, moe_k=3, moe_intermediate_size=24
    ),
    "latents": DeepseekV2Config(
        **SHAPE | {"vocab_size": 258, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 24},
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        n_routed_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        rope_parameters=YARN,
    ),
    "short convolutions": Lfm2Config(
        **SHAPE | {"vocab_size": 258}, layer_types=["conv", "full_attention", "conv"], conv_bias=True
    ),
    "delta nets, gated attention": Qwen3NextConfig(
        **MOE,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        head_dim=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=12,
        linear_value_head_dim=20,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
    ),
    "SparseMixer": PhimoeConfig(**SHAPE | {"vocab_size": 258}, num_local_experts=4, router_jitter_noise=0.6),
    "experts with norms of their own": Gemma4TextConfig(
        **test_gemma4_text.MOE | {"vocab_size": 258}, attention_k_eq_v=True, num_global_key_value_heads=1
    ),
    "norms of all heads": OlmoeConfig(**MOE, clip_qkv=0.5),
    "layer norms": DbrxConfig(
        vocab_size=258,
        d_model=32,
        n_layers=3,
        n_heads=4,
        max_seq_len=128,
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 0.5},
        ffn_config={"ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 3},
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_of_every_family(tmp_path, name, monkeypatch):
    write_byte_tokenizer(tmp_path / "model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[name]).save_pretrained(tmp_path / "model")
    pack(str(tmp_path / "model"), None, cache_dir=tmp_path, dtype="float32")
    config = config_of(tmp_path / "model", tmp_path, dtype="float32")
    check(config, monkeypatch)
