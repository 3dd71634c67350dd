"""A plan's configuration runs as it is. With other settings, the plan is decided again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.engine_config import ExpertSlotsConfig
from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.hardware import DEVICE, RAM
from moeflow.core.parallel_config import ParallelConfig
from moeflow.core.plan import Workload, plan_from_json, plan_to_json
from moeflow.kernels.cpu import extension
from moeflow.models.expert_predictor.saved import decoder_folder, predictor_folder
from moeflow.models.registry import read_model_config
from moeflow.planner import apply_plan as apply_plan_file
from moeflow.planner import pipeline_choice
from moeflow.planner.apply_plan import apply_plan, changes, machine_notice, settings_beside
from moeflow.planner.costs.process_memory import PROCESS_BYTES, served_bytes
from moeflow.planner.described import plan_described
from moeflow.planner.hardware import gpu_figures
from moeflow.planner.hardware.host import HostResources, host_of, host_resources
from moeflow.planner.hardware.this_machine import machine_identity
from moeflow.planner.resolve import resolve
from moeflow.planner.usage import Usage
from moeflow.settings.settings import Settings, from_plain
from tests.planner.example_plans import ENGINE_CONFIG, PLAN
from tests.planner.examples import machine
from tests.tiny_llama import write_tiny_llama
from tests.tiny_mixtral import write_tiny_mixtral
from tests.tiny_switch import write_tiny_switch

HERE = HostResources(
    num_cores=max(4, host_resources().num_cores),
    total_bytes=2**33,
    available_bytes=2**32,
    accelerator="cuda",
    accelerator_free_bytes=2**31,
    process_bytes=200 << 20,
)
LIKE_WORKLOAD = Usage(workload=Workload(prompt_len=20, gen_len=10, max_prompt_len=30), reserves_kv=True)
needs_kernels = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_mixtral(folder)
    return folder


def read_again(plan):
    """Return a plan that went through a file."""
    again = plan_from_json(plan_to_json(plan), "plan.json")
    assert again == plan
    return again


def resolved(folder, usage=LIKE_WORKLOAD, **settings):
    asked = {"device": "cpu", "cache_dir": folder, **settings}
    return read_again(resolve(Settings(model=str(folder), **asked), usage, resources=HERE).plan)


def described(folder, where, goal="throughput", **settings):
    usage = dataclasses.replace(LIKE_WORKLOAD, goal=goal, num_sequences=None if goal == "latency" else 8)
    asked = Settings(model=str(folder), cache_dir=folder, **settings)
    if where.num_devices:
        return read_again(plan_described(asked, usage, lambda _: where).plan)
    return read_again(resolve(asked, usage, machine_of=lambda _: where, resources=host_of(where)).plan)


def applied(plan, folder, **settings):
    return apply_plan(plan, {"model": str(folder), "cache_dir": folder, **settings}, resources=HERE)


def with_config(**changed):
    return dataclasses.replace(PLAN, config=dataclasses.replace(ENGINE_CONFIG, **changed))


@needs_kernels
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "bfloat16", "max_num_seqs": 5, "prefix_caching": False},
        {"quantize": "int4", "kv_dtype": "int8", "num_threads": 1, "max_model_len": 64},
        {"memory_bytes": 1 << 30},
        {"memory_bytes": 1 << 30, "is_served": True},
        {"num_ranks": 2, "num_threads": 4},
        {"stages": "2", "kv_cache_bytes": 1 << 20},
        {"num_ranks": 3, "listen_ranks": "[::1]:9200", "cluster_token_file": Path("/etc/token")},
        {"num_ranks": 2, "listen_ranks": "9200", "ray_address": "auto", "is_served": True},
        {"num_replicas": 2, "is_served": True},
        {"num_replicas": 2, "is_served": True, "memory_bytes": 1 << 31},
        {"speculators": ("suffix", "early-exit")},
        {"device": "emulated:64MiB,1,t4", "pipeline": "flexgen", "micro_batch": 4},
        {"device": "emulated:64MiB,0.5,torch"},
        {"device": "emulated:64MiB,1", "resident_experts": 0.5},
        {"device": "cuda:600MiB", "resident_experts": 0.25, "max_num_seqs": 8},
    ],
    ids=str,
)
def test_the_configuration_that_runs_is_the_plan_s(folder, settings):
    plan = resolved(folder, **settings)
    assert applied(plan, folder) is plan
    assert from_plain(plan.settings) == Settings(model=str(folder), cache_dir=folder, **{"device": "cpu"} | settings)


@needs_kernels
@pytest.mark.parametrize("goal", ["throughput", "latency", "memory"])
@pytest.mark.parametrize(
    ("where", "settings"),
    [
        (machine(ram=2 * 10**9), {}),
        (machine(ram=2 * 10**9), {"num_replicas": 2, "is_served": True}),
        (machine(ram=2 * 10**9), {"num_ranks": 2}),
        (machine(ram=10**9), {"memory_bytes": 6 * 10**8, "quantize": "int8"}),
        (machine(ram=2 * 10**9, device=840 * 10**6), {}),
        (machine(ram=2 * 10**9, device=820 * 10**6 + 10**5), {}),
    ],
    ids=["host", "replicas", "ranks", "limited", "device", "small device"],
)
def test_the_same_of_a_machine_in_a_file(folder, goal, where, settings):
    plan = described(folder, where, goal, **settings)
    assert applied(plan, folder) is plan
    assert 1 <= plan.config.num_threads <= host_resources().num_cores
    assert (plan.config.cpu_isa == "") == (where.num_devices > 0)
    assert plan.memory_bytes > 0
    assert plan.config.scheduler.num_blocks >= plan.config.scheduler.max_num_seqs * 3  # of 16 tokens, for 40


@needs_kernels
def test_a_limit_is_that_of_one_engine_in_the_configuration_and_of_all_in_the_settings(folder):
    plan = described(folder, machine(ram=2 * 10**9), num_replicas=2, memory_bytes=10**9, is_served=True)
    shape = read_model_config(open_checkpoint(folder))
    in_common = served_bytes(host_of(machine(ram=2 * 10**9)).process_bytes, shape)
    assert plan.config.memory.limit_bytes == in_common + (10**9 - in_common) // 2
    assert plan.settings["memory_bytes"] == 10**9


@needs_kernels
def test_requests_may_be_longer_than_the_workload_s(folder):
    for plan in (resolved(folder), described(folder, machine(ram=2 * 10**9))):
        scheduler = plan.config.scheduler
        assert scheduler.max_model_len == 512
        assert scheduler.num_blocks >= scheduler.max_num_seqs * 3  # of 16 tokens, for 40


@needs_kernels
def test_all_requests_of_the_workload_have_room_even_beyond_the_usual_share(folder):
    little = dataclasses.replace(HERE, available_bytes=PROCESS_BYTES + 5 * 2**20)
    asked = Settings(model=str(folder), cache_dir=folder, device="cpu", max_num_seqs=200)
    scheduler = resolve(asked, LIKE_WORKLOAD, resources=little).config.scheduler
    assert scheduler.num_blocks == 200 * 3  # of 16 tokens, for 40
    assert resolve(asked, resources=little).config.scheduler.num_blocks < 200 * 3
    with pytest.raises(CapacityError, match=r"a KV cache of .* is asked for, but"):
        resolve(dataclasses.replace(asked, max_num_seqs=1000), LIKE_WORKLOAD, resources=little)


@needs_kernels
def test_what_stays_on_a_device_stays_when_a_plan_is_decided_again(tmp_path, monkeypatch):
    folder, with_gpu = tmp_path, machine(ram=2 * 10**9, device=818 * 10**6)
    measured = (with_gpu.level(DEVICE), with_gpu.link(RAM, DEVICE), with_gpu.link(DEVICE, RAM))
    monkeypatch.setattr(pipeline_choice, "gpu_figures", lambda *_: gpu_figures.GpuFigures(*measured))
    write_tiny_mixtral(folder, intermediate_size=4096, num_hidden_layers=4)
    plan = described(folder, with_gpu, dtype="bfloat16", device="cuda:0:818MB")
    planned = plan.config.offload
    assert planned.num_resident_experts == 2  # of 4
    assert planned.num_hosted_experts == 2
    again = applied(plan, folder, num_threads=1).config
    free_bytes = again.offload.cuda.capacity_bytes  # the process of this machine takes less
    cuda = dataclasses.replace(planned.cuda, capacity_bytes=free_bytes)
    assert again.offload == dataclasses.replace(planned, cuda=cuda)
    again, limits = again.scheduler, plan.config.scheduler
    assert (again.max_model_len, again.max_num_batched_tokens) == (limits.max_model_len, limits.max_num_batched_tokens)
    again = applied(plan, folder, max_model_len=64)
    assert again.config.offload.num_resident_experts == 2
    assert (again.config.scheduler.max_model_len, again.config.scheduler.max_num_seqs) == (64, 8)


@needs_kernels
def test_what_the_user_sets_decides_the_plan_again(folder):
    plan = resolved(folder, quantize="int4", num_threads=2)
    again = applied(plan, folder, kv_dtype="int8")
    assert (again.config.kv_dtype, again.config.weight_format, again.config.num_threads) == ("int8", "int4", 2)
    assert again.config.scheduler.max_num_seqs == plan.config.scheduler.max_num_seqs
    assert applied(plan, folder, max_num_seqs=3).config.scheduler.max_num_seqs == 3
    assert applied(plan, folder, quantize="int4") is plan
    assert applied(plan, folder, dtype="bfloat16").config.weight_format == "bfloat16"
    assert again.workload == plan.workload


@needs_kernels
def test_a_server_s_own_process_counts_within_a_limit(folder):
    plan = resolved(folder)
    assert applied(plan, folder, is_served=True) is plan
    limited = resolved(folder, memory_bytes=1 << 30)
    assert applied(limited, folder, is_served=True).config.memory.is_served
    assert not limited.config.memory.is_served


@needs_kernels
def test_a_plan_is_decided_again_if_its_packed_weights_are_gone(folder, tmp_path):
    plan = resolved(folder)
    gone = dataclasses.replace(plan, config=dataclasses.replace(plan.config, packed_file=str(tmp_path / "gone")))
    assert applied(gone, folder).config.packed_file == ""


@needs_kernels
def test_a_plan_is_decided_again_if_the_importance_of_inputs_is_gone(folder, tmp_path):
    plan = resolved(folder)
    file = tmp_path / "importance"
    known = dataclasses.replace(plan, config=dataclasses.replace(plan.config, importance_file=str(file)))
    assert applied(known, folder).config.importance_file == ""
    file.touch()
    assert applied(known, folder) is known


@needs_kernels
def test_a_draft_model_that_is_gone_is_named(folder, tmp_path):
    draft = tmp_path / "draft"
    write_tiny_llama(draft, vocab_size=258)
    plan = resolved(folder, speculators=(str(draft),))
    assert applied(plan, folder) is plan
    draft.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"speculator .*draft' is unknown, and there is no such file"):
        applied(plan, folder)
    assert applied(plan, folder, speculators=("suffix",)).config.draft_models == ()


@needs_kernels
@pytest.mark.parametrize("gone", ["predictor.json", "predictor.safetensors"])
def test_a_predictor_that_is_gone_is_named(tmp_path, gone):
    write_tiny_switch(tmp_path)
    network = predictor_folder(tmp_path)
    for folder in (network, decoder_folder(network)):
        folder.mkdir()
        for name in ("predictor.json", "predictor.safetensors"):
            (folder / name).touch()
    plan = resolved(tmp_path, lossy_routing="sida")
    slots = ExpertSlotsConfig(packed_weights_file="", num_slots=4, slab_bytes=8, predictor="sida")
    config = dataclasses.replace(plan.config, experts=slots, lossy_top_k=0)
    in_routers = {name: value for name, value in plan.settings.items() if name != "lossy_routing"}
    reads_ahead = dataclasses.replace(plan, config=config, settings=in_routers)
    assert applied(plan, tmp_path) is plan
    assert applied(reads_ahead, tmp_path) is reads_ahead
    for folder in (network, decoder_folder(network)):
        (folder / gone).unlink()
    assert applied(reads_ahead, tmp_path) is not reads_ahead
    with pytest.raises(ConfigError, match="there is no predictor of this model's experts"):
        applied(plan, tmp_path)


@needs_kernels
@pytest.mark.parametrize(
    ("settings", "num_threads"),
    [
        ({}, 2),
        ({"num_ranks": 2}, 1),
        ({"num_ranks": 3}, 1),
        ({"num_replicas": 2, "is_served": True}, 1),
        ({"num_ranks": 2, "listen_ranks": "9200"}, 2),
    ],
    ids=str,
)
def test_a_plan_with_more_threads_than_cores_is_decided_again(folder, settings, num_threads):
    large, small = (dataclasses.replace(HERE, num_cores=number) for number in (12, 2))
    asked = Settings(model=str(folder), cache_dir=folder, device="cpu", **settings)
    plan = read_again(resolve(asked, LIKE_WORKLOAD, resources=large).plan)
    given = {"cache_dir": folder}
    assert plan.config.num_threads > num_threads
    assert apply_plan(plan, given, resources=large) is plan
    again = apply_plan(plan, given, resources=small)
    assert again.config.num_threads == num_threads
    assert apply_plan(again, given, resources=small) is again


@needs_kernels
def test_threads_that_the_user_planned_with_are_not_changed_silently(folder):
    plan = resolved(folder, num_threads=4)
    small = dataclasses.replace(HERE, num_cores=2)
    with pytest.raises(ConfigError, match=r"needs 4 threads, but this machine has 2 cores.*at most 2 \(--threads\)"):
        apply_plan(plan, {"cache_dir": folder}, resources=small)
    given = {"cache_dir": folder, "num_threads": 2}
    assert apply_plan(plan, given, resources=small).config.num_threads == 2


def test_settings_that_depend_on_another_change_with_it():
    on_device = dataclasses.replace(
        PLAN,
        settings={"device": "emulated:64MiB,1", "pipeline": "flexgen", "resident_experts": 0.5, "dtype": "bfloat16"},
    )
    assert changes(on_device, {"pipeline": "cgopipe"}) == {"pipeline": "cgopipe"}
    assert changes(on_device, {"device": "cpu"}) == {"device": "cpu", "pipeline": None, "resident_experts": None}
    growing = dataclasses.replace(PLAN, settings={"num_replicas": 2, "max_replicas": 4})
    quick = dataclasses.replace(PLAN, settings=growing.settings | {"target_first_token_s": 2.0})
    assert changes(quick, {"max_replicas": 6}) == {"max_replicas": 6}
    assert changes(quick, {"num_replicas": 1}) == dict.fromkeys(quick.settings) | {"num_replicas": 1}
    assert changes(growing, {"num_replicas": 1}) == {"num_replicas": 1, "max_replicas": None}
    assert changes(growing, {"num_replicas": 3, "max_replicas": 4}) == {"num_replicas": 3}
    assert changes(on_device, {"quantize": "int8"}) == {"quantize": "int8", "dtype": "auto"}


@needs_kernels
@pytest.mark.parametrize(
    ("planned", "given"),
    [
        ({"num_ranks": 2, "expert_placement": "load"}, {"num_ranks": 1}),
        ({"num_ranks": 2, "num_redundant_experts": 2}, {"num_ranks": 1}),
        ({"num_ranks": 2, "attention_layout": "tensor"}, {"num_ranks": 1}),
        ({"num_ranks": 2, "expert_placement": "load"}, {"expert_layout": "sliced"}),
        ({"num_ranks": 2, "num_redundant_experts": 2}, {"expert_layout": "sliced"}),
        ({"num_ranks": 2, "num_redundant_experts": 2}, {"expert_placement": "index"}),
        ({"num_ranks": 2, "expert_layout": "sliced"}, {"device": "emulated:64MiB,1"}),
        ({"stages": "2"}, {"device": "emulated:64MiB,1"}),
        ({"num_replicas": 2, "is_served": True}, {"device": "emulated:64MiB,1"}),
        ({"device": "emulated:64MiB,1", "pipeline": "flexgen"}, {"device": "cpu"}),
    ],
    ids=str,
)
def test_settings_that_depend_on_a_changed_one_do_not_refuse_it(folder, planned, given):
    again = applied(resolved(folder, **planned), folder, **given)
    assert given.items() <= from_plain(again.settings).__dict__.items()


def test_a_default_changes_a_plan_if_the_user_gives_it():
    plan = dataclasses.replace(PLAN, settings={"prefix_caching": False, "kv_dtype": "int8"})
    assert changes(plan, {}) == {}
    assert changes(plan, {"prefix_caching": True}) == {"prefix_caching": True}
    assert settings_beside(plan, {"kv_dtype": "auto"}).kv_dtype == "auto"


def test_the_device_that_a_plan_chose_is_no_change():
    plan = dataclasses.replace(PLAN, settings={"memory_bytes": 1 << 30, "num_ranks": 2})
    assert changes(plan, {"device": "cpu"}) == changes(plan, {"device": "auto"}) == {}
    assert changes(plan, {"device": "cuda"}) == {"device": "cuda", "memory_bytes": None, "num_ranks": None}


def test_the_number_of_requests_stays_unless_the_user_sets_it():
    assert settings_beside(PLAN, {}, HERE).max_num_seqs == 6
    assert settings_beside(PLAN, {"max_num_seqs": 2}, HERE).max_num_seqs == 2


@pytest.mark.parametrize(
    ("changed", "explicit", "complaint"),
    [
        ({}, {"model": "other"}, "not for other: make one for this model, `moeflow plan other --json`"),
        ({"model_path": "/models/config.json"}, {}, "without weights: make one for a folder"),
        ({"model_path": "mixtral-8x7b"}, {}, "without weights: make one for a folder"),
    ],
)
def test_plans_for_something_else_are_refused(changed, explicit, complaint):
    with pytest.raises(ConfigError, match=complaint):
        apply_plan(with_config(**changed), explicit)


@needs_kernels
def test_a_plan_that_does_not_fit_here_is_refused(folder):
    plan = resolved(folder)
    larger = dataclasses.replace(plan, memory_bytes=2**33)
    with pytest.raises(CapacityError, match=r"needs 8\.0 GiB of memory, but 4\.0 GiB are free.*moeflow plan --json"):
        applied(larger, folder)
    elsewhere = dataclasses.replace(plan, config=dataclasses.replace(plan.config, cpu_isa="avx9"))
    with pytest.raises(ConfigError, match=r"CPU kernels for avx9.*make the plan here"):
        applied(elsewhere, folder)
    on_gpu = resolved(folder, device="cuda:600MiB", max_num_seqs=8)
    none = dataclasses.replace(HERE, accelerator=None)
    with pytest.raises(ConfigError, match="finds no CUDA device"):
        apply_plan(on_gpu, {"cache_dir": folder}, resources=none)
    ranks = ParallelConfig(num_ranks=2, expert_layout="sliced")
    shared = dataclasses.replace(on_gpu.config, parallel=ranks, num_threads=1)
    with pytest.raises(ConfigError, match=r"needs 2 GPUs from cuda:0 on, and there are 1: make it here"):
        apply_plan(dataclasses.replace(on_gpu, config=shared), {"cache_dir": folder}, resources=HERE)
    smaller = dataclasses.replace(HERE, accelerator_free_bytes=2**20)
    with pytest.raises(CapacityError, match="device memory"):
        apply_plan(on_gpu, {"cache_dir": folder}, resources=smaller)


def test_a_plan_of_several_processes_knows_its_machine(monkeypatch):
    monkeypatch.setattr(apply_plan_file, "host_resources", lambda: HERE)
    made_here = dataclasses.replace(with_config(num_threads=1), machine_identity=machine_identity(HERE.num_cores))
    ranks = dataclasses.replace(made_here, settings={"num_ranks": HERE.num_cores})
    assert machine_notice(ranks, None) is machine_notice(ranks, HERE.num_cores) is None
    assert "with --threads 2" in (machine_notice(ranks, 2) or "")
    with_threads = dataclasses.replace(ranks, settings={"num_threads": 3}, machine_identity=machine_identity(3))
    assert machine_notice(with_threads, None) is None


def test_a_plan_of_another_machine_is_reported():
    here = dataclasses.replace(PLAN, machine_identity=machine_identity(3))
    assert machine_notice(here, 3) is None
    many = dataclasses.replace(with_config(num_threads=10**6), settings={})
    assert "1000000 threads a process, but this machine has" in (machine_notice(many, None) or "")
    assert "with --threads 2" in (machine_notice(here, 2) or "")
    notice = machine_notice(dataclasses.replace(with_config(num_threads=1), machine="t4"), None)
    assert notice is not None
    assert "made for t4, not for this one" in notice
