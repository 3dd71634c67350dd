"""`--device auto` takes a GPU only for what runs there: a machine with a GPU refuses nothing that one without takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from transformers import T5Config, T5ForConditionalGeneration

from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.plan import Plan
from moeflow.core.units import GIB, MIB
from moeflow.kernels.cpu import extension
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.costs.process_memory import PROCESS_BYTES
from moeflow.planner.hardware.host import HostResources
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings, options
from tests.engine.test_recurrent_models import write_tiny_granite_hybrid, write_tiny_lfm2
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())

CPU = HostResources(4, 32 * GIB, 16 * GIB, None, 0)
GPU = dataclasses.replace(CPU, accelerator="cuda:1", accelerator_free_bytes=8 * GIB, next_free_bytes=(8 * GIB,))
TOKENS = 512  # longest request of the tiny models


def write_tiny_t5(folder: Path) -> None:
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 1, "vocab_size": 64}
    T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).save_pretrained(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder)
    return str(folder)


def plan(model, machine, **settings):
    return resolve(Settings(model=model, is_served=True, **settings), resources=machine).plan


def reason(plan) -> str:
    return dict(plan.reasons)["device"]


# A value of each option; None: it needs another option or file, or is about a device itself.
VALUES = {
    "dtype": "bfloat16",
    "quantize": "int8",
    "exact_activations": True,
    "packed_weights_file": None,
    "memory_bytes": GIB,
    "kv_cache_bytes": 8 * MIB,
    "kv_dtype": "int8",
    "max_model_len": 100,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 64,
    "prefix_caching": False,
    "prompt_cache": None,
    "prompt_cache_bytes": GIB,
    "num_threads": 2,
    "num_ranks": 2,
    "stages": "2",
    "expert_placement": None,
    "num_redundant_experts": None,
    "expert_layout": None,
    "attention_layout": None,
    "rank_schedule": None,
    "num_replicas": 2,
    "max_replicas": None,
    "target_first_token_s": None,
    "listen_ranks": None,
    "cluster_token_file": None,
    "ray_address": None,
    "ray_placement": None,
    "remote_experts": None,
    "device": None,
    "gpu_memory_bytes": None,
    "pipeline": None,
    "micro_batch": None,
    "prompt_micro_batch": None,
    "speculators": ("suffix",),
    "capacity_factor": None,
    "lossy_routing": None,
    "generation_config": "none",
    "expert_policy": "auto",
    "predictor": "none",
    "record_routing": Path("/nowhere/routing"),
    "trace_file": Path("/nowhere/trace"),
    "graph_file": Path("/nowhere/graph"),
}
ON_GPU = {  # of these, what a GPU takes
    "dtype",
    "exact_activations",
    "memory_bytes",
    "kv_cache_bytes",
    "kv_dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "prefix_caching",
    "num_threads",
    "num_ranks",
    "speculators",
    "generation_config",
    "expert_policy",
    "predictor",
    "record_routing",
    "trace_file",
    "graph_file",
}


def test_every_option_has_a_value():
    assert VALUES.keys() == options().keys()


@pytest.mark.parametrize("name", [name for name, value in VALUES.items() if value is not None])
def test_an_option_that_the_cpu_takes_is_taken_where_there_is_a_gpu(model, name, tmp_path):
    settings = {name: VALUES[name], "cache_dir": tmp_path}
    assert plan(model, CPU, **settings).config.device == "cpu"
    found = plan(model, GPU, **settings)
    assert found.config.device == ("cuda:1" if name in ON_GPU else "cpu")
    if name in ON_GPU:
        assert found.config == plan(model, GPU, device="cuda:1", **settings).config
        assert reason(found) == "cuda:1: it holds the model"
        return
    flag = options()[name].flag.split("/")[0]
    assert flag in reason(found)
    with pytest.raises(ConfigError, match=f"{flag} is for the processor: .*; use --device cpu, or remove {flag}"):
        plan(model, GPU, device="cuda:1", **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_ranks": 2, "listen_ranks": "127.0.0.1:7"},
        {"prompt_cache": "prompts"},
        {"num_ranks": 2, "num_redundant_experts": 1},
        {"packed_weights_file": "packed"},
    ],
)
def test_so_are_options_that_need_others(model, settings, tmp_path):
    if "packed_weights_file" in settings:
        pack(model, tmp_path / "packed", cache_dir=tmp_path, num_threads=1)
    if "prompt_cache" in settings or "packed_weights_file" in settings:
        settings = {name: tmp_path / file for name, file in settings.items()}
    assert (
        plan(model, GPU, cache_dir=tmp_path, **settings).config
        == plan(model, CPU, cache_dir=tmp_path, **settings).config
    )
    with pytest.raises(ConfigError, match="is for the processor"):
        plan(model, GPU, device="cuda:1", cache_dir=tmp_path, **settings)


def test_without_options_a_gpu_computes(model):
    for settings in ({}, {"num_ranks": 1, "num_replicas": 1}, {"speculators": ("auto",)}):
        assert plan(model, GPU, **settings).config.device == "cuda:1"


def test_a_gpu_drafts_from_text_alone_and_if_asked(model):
    drafting = plan(model, GPU, speculators=("suffix",)).config
    assert (drafting.device, drafting.speculators) == ("cuda:1", ("suffix",))
    found = plan(model, GPU, speculators=("auto",))
    assert found.config.speculators == ()
    assert "named (--speculator suffix)" in dict(found.reasons)["speculators"]
    assert plan(model, CPU, speculators=("auto",)).config.speculators == ("suffix",)
    for asked in (("/a/model",), ("suffix", "early-exit:1")):
        with pytest.raises(ConfigError, match=f"--speculator {asked[-1]} is for the processor"):
            plan(model, GPU, device="cuda:1", speculators=asked)


def test_families_that_no_gpu_runs_are_run_on_the_cpu(tmp_path):
    write_tiny_t5(tmp_path)
    found = plan(str(tmp_path), GPU)
    assert found.config == plan(str(tmp_path), CPU).config
    assert "GPUs do not run an encoder" in reason(found)
    for device in ("cuda:1", "cuda:1:1GiB"):
        with pytest.raises(ConfigError, match=r"GPUs do not run an encoder.*use --device cpu"):
            plan(str(tmp_path), GPU, device=device)


@pytest.mark.parametrize("write", [write_tiny_lfm2, write_tiny_granite_hybrid])
def test_a_gpu_runs_recurrent_layers_if_it_holds_the_model(tmp_path, write):
    write(tmp_path)
    found = plan(str(tmp_path), GPU).config
    assert found.device == "cuda:1"
    assert found.scheduler.states is not None
    with pytest.raises(ConfigError, match=r"pipelines of a device .* do not go with recurrent layers"):
        plan(str(tmp_path), GPU, device="cuda:1:1GiB")


def test_a_model_larger_than_the_card_runs_on_the_cpu(model):
    small = dataclasses.replace(GPU, accelerator_free_bytes=PROCESS_BYTES + 100_000)
    found = plan(model, small)
    assert found.config == plan(model, CPU).config
    assert "cuda:1 does not hold the model: the weights need" in reason(found)
    with pytest.raises(
        CapacityError, match=r"cuda:SIZE.*without experts, the model needs .* of cuda:1 are free: .*--device cpu"
    ):
        plan(model, small, device="cuda:1")


def test_a_model_larger_than_one_card_is_shared_by_several(model):
    def least(**cards) -> tuple[int, Plan]:
        """Return the least memory of each card that holds the model, and the plan."""
        for size in range(PROCESS_BYTES, PROCESS_BYTES + 400 * MIB, MIB // 4):
            gpus = {name: (size,) * number for name, number in cards.items()}
            found = plan(model, dataclasses.replace(GPU, accelerator_free_bytes=size, **gpus), max_num_seqs=1)
            if found.config.device == "cuda:1":
                return size, found
        raise AssertionError("no card holds it")

    alone, on_one = least(next_free_bytes=0)
    each, on_two = least(next_free_bytes=1)
    assert each < alone
    assert on_one.config.parallel is None
    assert on_two.config.parallel.num_ranks == 2
    assert reason(on_two).startswith("cuda:1 and 1 more share each layer: ")
    assert plan(model, GPU).config.parallel is None


def test_ranks_that_their_cards_are_too_small_for_leave_no_experts_to_the_cpu(model):
    small = dataclasses.replace(GPU, accelerator_free_bytes=PROCESS_BYTES, next_free_bytes=(PROCESS_BYTES,))
    with pytest.raises(CapacityError, match=r"of cuda:1 are free: use --device cpu"):
        plan(model, small, device="cuda:1", num_ranks=2)


def test_more_ranks_than_cards_are_refused_with_their_number(model):
    with pytest.raises(ConfigError, match=r"4 ranks .* on GPUs need one each, but 2 GPUs are there.*use fewer"):
        plan(model, GPU, device="cuda:1", num_ranks=4)
    assert plan(model, GPU, num_ranks=4).config.device == "cpu"


def test_passes_and_graphs_have_memory_of_their_own(model):
    """More requests at once need larger graphs and more rows of logits; the weights stay the same."""

    def words(number: int) -> list[str]:
        found = dict(plan(model, GPU, max_num_seqs=number, max_num_batched_tokens=4096).reasons)["work space"]
        assert found.endswith(" for CUDA graphs")
        return found.split()

    def least(number: int) -> int:
        """Return the least memory, in steps of a MiB, with which the GPU holds the model."""
        sizes = range(PROCESS_BYTES, PROCESS_BYTES + 400 * MIB, MIB)
        cards = (dataclasses.replace(GPU, accelerator_free_bytes=size) for size in sizes)
        return next(
            card.accelerator_free_bytes - PROCESS_BYTES
            for card in cards
            if plan(model, card, max_num_seqs=number, max_num_batched_tokens=4096).config.device == "cuda:1"
        )

    few, many = words(1), words(64)
    assert (few[1], few[6]) == (many[1], many[6]) == ("MiB", "MiB")
    assert float(many[0]) > float(few[0])
    assert float(few[5]) >= 20 + 32
    assert float(many[5]) == float(few[5]) + 8  # eight graphs of 64 kernels more
    assert least(1) / MIB >= float(few[0]) + float(few[5])
    assert (least(64) - least(1)) / MIB == pytest.approx(
        float(many[0]) + float(many[5]) - float(few[0]) - float(few[5]), abs=2
    )


def test_a_card_with_room_for_the_model_alone_is_left_unused(model):
    found = next(
        size
        for size in range(PROCESS_BYTES, PROCESS_BYTES + 400 * MIB, MIB // 4)
        if "does not hold" not in reason(plan(model, dataclasses.replace(GPU, accelerator_free_bytes=size)))
    )
    free = found - MIB // 2
    sizes = [free + extra for extra in range(0, 4 * MIB, 20_000)]
    found = [plan(model, dataclasses.replace(GPU, accelerator_free_bytes=size)) for size in sizes]
    reasons = [reason(it) for it in found]
    assert {it.config.scheduler.max_model_len for it in found if it.config.device == "cuda:1"} == {TOKENS}
    assert any("cuda:1 has room for requests of" in it for it in reasons)
    assert reasons[-1] == "cuda:1: it holds the model"


def test_a_card_without_kernels_is_left_unused_unless_it_is_named(model):
    bare = dataclasses.replace(GPU, why_no_kernels="Failed to find C compiler; install gcc")
    found = plan(model, bare)
    assert found.config == plan(model, CPU).config
    why = "cpu: Triton's kernels do not run on cuda:1: Failed to find C compiler; install gcc"
    assert reason(found) == why
    assert plan(model, bare, device="cuda:1").config.device == "cuda:1"


def test_models_of_one_server_share_main_memory(model):
    found = plan(model, GPU, shares_memory=True)
    assert (found.config.device, reason(found)) == ("cpu", "cpu: models of one server share main memory")


def test_a_gpu_that_torch_cannot_use_is_named_with_the_reason(model):
    old = dataclasses.replace(CPU, why_no_accelerator="torch cannot compute on cuda:0: no kernel image")
    assert reason(plan(model, old)) == "cpu: torch cannot compute on cuda:0: no kernel image"
    with pytest.raises(ConfigError, match=r"cuda:0 is asked for, but torch cannot compute on cuda:0: no kernel image"):
        plan(model, old, device="cuda:0")


def test_a_limit_of_a_gpu_s_memory_needs_a_gpu(model, tmp_path):
    assert plan(model, GPU, gpu_memory_bytes=GIB).config.gpu_memory_bytes == GIB
    write_tiny_t5(tmp_path)
    for name, machine, why in ((model, CPU, "finds no CUDA device"), (str(tmp_path), GPU, "do not run an encoder")):
        with pytest.raises(ConfigError, match=f"--gpu-memory .* the CPU computes: .*{why}.*Remove it"):
            plan(name, machine, gpu_memory_bytes=GIB)
