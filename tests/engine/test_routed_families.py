"""Families whose routing or layers have something of their own: the same tokens wherever their experts lie."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    HunYuanMoEV1Config,
    Lfm2MoeConfig,
    MiniMaxM2Config,
    PhimoeConfig,
    Qwen3NextConfig,
)
from transformers import Qwen2MoeConfig as QwenConfig

from moeflow.core.engine_config import ExpertSlotsConfig
from moeflow.engine import expert_store
from moeflow.kernels.cpu import extension
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.engine.streamed_runs import run
from tests.marks import thorough_unless
from tests.models import test_dbrx, test_fairseq_moe, test_gemma4_text, test_gpt_moe
from tests.models.parity import SHAPE, random_model
from tests.models.plain_gpt import PlainGPT

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
PROMPTS = [[5, 9, 70, 31, 7], [40], list(range(20, 60))]
ROUTED = {"moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
FAMILIES = {
    "deepseek_v2": DeepseekV2Config(**SHAPE | ROUTED | LATENT),
    "deepseek_v3": DeepseekV3Config(**SHAPE | ROUTED | LATENT | {"q_lora_rank": 18}, n_group=4, topk_group=2),
    "dbrx": test_dbrx.config({"clip_qkv": 0.5}, moe_num_experts=8, moe_top_k=3),
    "phimoe": PhimoeConfig(**SHAPE, num_local_experts=8, attention_bias=True, lm_head_bias=True),
    "dots1": Dots1Config(**SHAPE, **ROUTED, n_shared_experts=2, norm_topk_prob=True, sliding_window=None),
    "ernie4_5_moe": Ernie4_5_MoeConfig(**SHAPE, moe_intermediate_size=24, moe_num_experts=8, moe_k=3),
    "gemma4_text": test_gemma4_text.CONFIGS["as published"],
    "glm4_moe": Glm4MoeConfig(**SHAPE, **ROUTED, head_dim=16, n_group=4, topk_group=2, routed_scaling_factor=2.5),
    "gpt_oss": GptOssConfig(**SHAPE, num_local_experts=8, num_experts_per_tok=3, head_dim=16, sliding_window=11),
    "granitemoehybrid": GraniteMoeHybridConfig(
        **SHAPE,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=12,
        num_local_experts=8,
        num_experts_per_tok=3,
        shared_intermediate_size=40,
        residual_multiplier=0.3,
        embedding_multiplier=5.0,
    ),
    "granitemoeshared": GraniteMoeSharedConfig(
        **SHAPE,
        num_local_experts=8,
        num_experts_per_tok=3,
        shared_intermediate_size=40,
        residual_multiplier=0.3,
        embedding_multiplier=5.0,
    ),
    "hunyuan_v1_moe": HunYuanMoEV1Config(**SHAPE, num_experts=8, moe_topk=3, head_dim=8),
    "lfm2_moe": Lfm2MoeConfig(
        **SHAPE,
        layer_types=["conv", "full_attention", "conv"],
        num_dense_layers=1,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=3,
    ),
    "minimax_m2": MiniMaxM2Config(**SHAPE, head_dim=16, rotary_dim=8, num_local_experts=8, num_experts_per_tok=3),
    "qwen2_moe": QwenConfig(
        **SHAPE, moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=8, num_experts_per_tok=3
    ),
    "qwen3_next": Qwen3NextConfig(
        **SHAPE,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        head_dim=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=12,
        linear_value_head_dim=20,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        num_experts=8,
        num_experts_per_tok=3,
    ),
}


def write_with_transformers(family, folder):
    random_model(FAMILIES[family]).save_pretrained(folder)


def write_fairseq(_, folder):
    choices, num_ranks = test_fairseq_moe.CASES["as the 15B model"]
    test_fairseq_moe.write(PlainGPT(choices), num_ranks, folder)


def write_faster_transformer(_, folder):
    choices, num_ranks, dtype = test_gpt_moe.CASES["as the published model"]
    test_gpt_moe.write(PlainGPT(choices), num_ranks, dtype, folder)


WRITERS = {"fairseq_moe": write_fairseq, "gpt_moe": write_faster_transformer}  # of files that are not transformers'


@pytest.mark.parametrize(
    ("family", "quantize"),
    thorough_unless(
        lambda family, quantize: quantize == "int8" or family in ("deepseek_v3", "gpt_oss"),
        itertools.product((*FAMILIES, *WRITERS), (None, "int8")),
    ),
)
def test_tokens_are_the_same_wherever_experts_lie(tmp_path, monkeypatch, family, quantize):
    monkeypatch.setattr(expert_store, "probe_read_depth", lambda *_: 2)
    (tmp_path / "model").mkdir()
    WRITERS.get(family, write_with_transformers)(family, tmp_path / "model")

    def config_of():
        settings = {"num_threads": 1, "kv_cache_bytes": 2**20, "quantize": quantize, "cache_dir": tmp_path}
        return resolve(Settings(model=str(tmp_path / "model"), **settings)).config

    resident = config_of()
    expected = run(resident, PROMPTS)
    index = pack(str(tmp_path / "model"), None, cache_dir=tmp_path, quantize=quantize)
    assert run(config_of(), PROMPTS) == expected
    for num_slots in (4, 9):
        experts = ExpertSlotsConfig(
            packed_weights_file=str(index.path), num_slots=num_slots, slab_bytes=index.spec.slab_bytes
        )
        assert run(dataclasses.replace(resident, experts=experts), PROMPTS) == expected
