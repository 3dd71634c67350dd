"""However layers are cut into stages, each request gets the tokens and log-probabilities of one process, to the bit.

Passes mix chunks of prompts with decodes, have many micro-batches, reuse prefixes, and have so few blocks that requests
are preempted.
"""

from __future__ import annotations

import dataclasses
import signal

import msgspec
import psutil
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma4TextConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from moeflow.core.errors import ConfigError, GroupError
from moeflow.core.parallel_config import MicroBatchCosts
from moeflow.engine.engine import Engine
from moeflow.engine.ranks import stage_forward
from moeflow.kernels.cpu import extension
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.engine.ranks import mixed_requests
from tests.engine.ranks.mixed_requests import ASKED, run

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
SHAPE = {
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
MOE = SHAPE | {"num_experts": 6, "num_experts_per_tok": 2}
MODELS: dict[str, PretrainedConfig] = {
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "llama": LlamaConfig(**SHAPE, attention_bias=True, tie_word_embeddings=True),
    "olmoe": OlmoeConfig(**MOE, clip_qkv=0.5),
    "qwen3_moe": Qwen3MoeConfig(**MOE, moe_intermediate_size=32, head_dim=16, mlp_only_layers=[0, 1]),
    "deepseek_v3": DeepseekV3Config(
        **SHAPE | {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32},
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
    "gemma4_text": Gemma4TextConfig(
        **SHAPE | {"num_hidden_layers": 6},
        head_dim=16,
        global_head_dim=32,
        sliding_window=11,
        layer_types=["sliding_attention", "full_attention"] * 3,
        hidden_size_per_layer_input=20,
        vocab_size_per_layer_input=258,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
    ),
}
OFTEN_CUT = MicroBatchCosts(fixed_s=0.0, expert_s=0.0, num_experts=0, top_k=0, token_s=1.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folders = {}
    for name, config in MODELS.items():
        torch.manual_seed(0)
        folders[name] = str(tmp_path_factory.mktemp(name))
        AutoModelForCausalLM.from_config(config).save_pretrained(folders[name])
    return folders


def config_of(model, *, is_often_cut=True, **settings):
    """Return a configuration whose passes are cut as often as can be, or as the rule says."""
    config = mixed_requests.config_of(model, **settings)
    parallel = config.parallel
    if is_often_cut and parallel is not None and parallel.stages is not None:
        stages = msgspec.structs.replace(parallel.stages, costs=OFTEN_CUT)
        config = dataclasses.replace(config, parallel=dataclasses.replace(parallel, stages=stages))
    return config


@pytest.fixture(scope="module")
def alone(models):
    """Return what one process answers; each is asked once."""
    known = {}

    def answers(name, **settings):
        key = (name, *sorted(settings.items()))
        if key not in known:
            known[key], _ = run(config_of(models[name], **settings))
        return known[key]

    return answers


@pytest.mark.parametrize(
    ("name", "settings", "layout"),
    [
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in (
                ("mixtral", {"quantize": "int8"}, {"stages": "1,3,1"}),
                ("gemma4_text", {"quantize": "int8"}, {"stages": "3"}),
                ("olmoe", {}, {"stages": "3"}),
                ("qwen3_moe", {"kv_dtype": "bfloat16"}, {"stages": "3"}),
                ("llama", {}, {"stages": "2", "num_ranks": 4, "attention_layout": "tensor"}),
            )
        ),
        ("mixtral", {}, {"stages": "2"}),
        ("mixtral", {"quantize": "int4", "kv_dtype": "int8"}, {"stages": "5"}),
        ("mixtral", {"dtype": "bfloat16", "prefix_caching": False}, {"stages": "2", "is_often_cut": False}),
        ("llama", {}, {"stages": "4,1"}),
        ("gemma4_text", {"kv_dtype": "int8"}, {"stages": "1,1,4"}),
        ("deepseek_v3", {"kv_dtype": "int8"}, {"stages": "2"}),
        ("mixtral", {}, {"stages": "2", "num_ranks": 4, "num_redundant_experts": 1}),
        ("qwen3_moe", {}, {"stages": "2,3", "num_ranks": 4, "expert_layout": "sliced", "attention_layout": "tensor"}),
    ],
    ids=str,
)
def test_requests_get_the_tokens_and_log_probabilities_of_one_process(
    models, alone, in_threads, name, settings, layout
):
    found, stats = run(config_of(models[name], **settings, **layout))
    assert found == alone(name, **settings)
    assert found[1] > 0  # were preempted
    assert (found[2] > 0) == settings.get("prefix_caching", True)
    assert all(rank.busy_s_total > 0 for rank in stats.ranks)
    assert all(rank.waited_s_total > 0 for rank in stats.ranks)


def test_stages_are_mapped_from_a_packed_file(models, alone, in_threads, tmp_path):
    for name in ("qwen3_moe", "llama"):  # one of them ties embeddings to the output projection
        pack(models[name], None, cache_dir=tmp_path)
        for layout in ({"stages": "2"}, {"stages": "2", "num_ranks": 4, "attention_layout": "tensor"}):
            config = config_of(models[name], cache_dir=tmp_path, **layout)
            assert config.packed_file
            assert run(config)[0] == alone(name)


def test_statistics_name_the_layers_of_each_rank(models, in_threads):
    _, stats = run(config_of(models["mixtral"], stages="2,3", num_ranks=4, expert_placement="index"))
    assert [(rank.first_layer, rank.num_layers) for rank in stats.ranks] == [(0, 2), (0, 2), (2, 3), (2, 3)]
    assert [rank.num_experts for rank in stats.ranks] == [4, 4, 6, 6]  # two of four in each layer


def test_a_stage_that_fails_ends_the_engine_with_what_failed(models, in_threads, monkeypatch):
    """On the last of three, while the first one sends to the second."""
    engine = Engine.load(config_of(models["mixtral"], stages="3"))
    try:
        monkeypatch.setattr(stage_forward, "rows_of", break_down)
        engine.submit(ASKED[0])
        with pytest.raises(GroupError, match="rank 2: ValueError: out of order"):
            engine.step()
    finally:
        engine.close()


def break_down(hidden, rows):
    raise ValueError("out of order")


@pytest.mark.slow
def test_a_killed_stage_ends_the_engine_with_an_error_that_names_it(models):
    """The one between two: the last waits for it, the first sends to it or waits for the last."""
    engine = Engine.load(config_of(models["mixtral"], stages="3"))
    try:
        engine.submit(ASKED[0])
        engine.step()
        stage = process_of_rank(1)
        stage.kill()
        with pytest.raises(GroupError, match=f"rank 1 .*process {stage.pid}") as caught:
            step_often(engine)
        assert caught.value.signal_number == signal.SIGKILL
    finally:
        engine.close()


def process_of_rank(rank):
    running = (child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE)
    children = ((child, child.cmdline()) for child in running)
    module = "moeflow.engine.ranks.main"
    (found,) = (it for it, words in children if words[3:4] == [module] and words[-1] == str(rank))
    return found


def step_often(engine):
    for _ in range(100):
        engine.step()


@pytest.mark.parametrize(
    ("name", "settings", "complaint"),
    [
        ("mixtral", {"stages": "6"}, "6 stages .*cannot share 5 layers"),
        ("mixtral", {"stages": "2,2"}, "2, 2 layers .* have 4 in total, but the model has 5"),
        ("mixtral", {"stages": "2,0,3"}, "'2,0,3' .* neither a number"),
        ("mixtral", {"stages": "two"}, "'two' .* neither a number"),
        ("mixtral", {"stages": "2", "num_ranks": 3}, "3 ranks .* 2 stages .*multiple of 2"),
        ("mixtral", {"stages": "2", "expert_layout": "sliced"}, "--expert-layout sliced is for several ranks"),
        (
            "llama",
            {"stages": "2", "num_ranks": 4, "attention_layout": "replicated"},
            "without experts.*--attention-layout tensor",
        ),
        ("mixtral", {"stages": "2", "device": "emulated:64MiB,1"}, "--stages does not go with a device"),
    ],
)
def test_what_cannot_be_cut_so_is_refused_with_what_to_do(models, name, settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        config_of(models[name], **settings)


def test_routing_is_not_recorded_where_no_rank_sees_all_of_it(models, tmp_path):
    with pytest.raises(ConfigError, match=r"--record-routing.*--stages"):
        config_of(models["mixtral"], stages="2", record_routing=tmp_path / "routing")


def test_a_plan_says_what_each_stage_has(models):
    settings = {"num_threads": 2, "stages": "2", "kv_cache_bytes": 2**20}
    plan = resolve(Settings(model=models["qwen3_moe"], **settings)).plan
    reasons = dict(plan.reasons)
    assert reasons["stages"].startswith("2: 3, 2 of the 5 layers")
    assert "memory of ranks" in reasons
    assert plan.config.num_threads == 1
    assert (plan.config.parallel.num_ranks, plan.config.parallel.stages.num_layers) == (2, (3, 2))
