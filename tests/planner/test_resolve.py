"""Decisions: a fitting setup is chosen with a reason, any other is refused before anything loads."""

from __future__ import annotations

import dataclasses
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CapacityError, CheckpointError, ConfigError
from moeflow.core.parallel_config import JoinConfig, NodeReplicas, RayConfig
from moeflow.core.plan import plan_from_json, plan_to_json
from moeflow.core.units import GIB, MIB
from moeflow.experts.cache.policies import DEFAULT_POLICY
from moeflow.kernels.cpu import extension
from moeflow.models.expert_predictor.network import ExpertPredictor, PredictorShape
from moeflow.models.expert_predictor.saved import predictor_folder, save_predictor
from moeflow.planner import host_forecast, memory_budget
from moeflow.planner.costs.process_memory import ENGINE_BYTES, HTTP_BYTES, PROCESS_BYTES, margin_bytes
from moeflow.planner.hardware.host import HostResources, host_resources
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.tiny_mixtral import write_tiny_mixtral

needs_extension = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder)
    return str(folder)


@pytest.fixture
def without_kernels(monkeypatch):
    monkeypatch.setattr(extension, "is_available", lambda: False)
    monkeypatch.delattr(extension, "_cpu", raising=False)


def machine(free: int = 16 * GIB, **changes) -> HostResources:
    return dataclasses.replace(HostResources(4, 32 * GIB, free, None, 0), **changes)


@needs_extension
def test_everything_is_decided_with_its_reason(model):
    plan = resolve(Settings(model=model), resources=machine()).plan
    config = plan.config
    assert (config.device, config.weight_format, config.num_threads) == ("cpu", "float32", 4)
    assert config.scheduler.max_model_len == 512
    assert config.scheduler.num_blocks == 32 * config.scheduler.max_num_seqs
    assert {name for name, _ in plan.reasons} == {
        "device",
        "weights",
        "kv_dtype",
        "num_threads",
        "kv_cache",
        "max_model_len",
    }


@needs_extension
def test_ranks_that_join_have_their_own_threads_and_memory(model, tmp_path):
    asked = Settings(model=model, num_ranks=3, num_threads=4, cache_dir=tmp_path, max_num_seqs=10**5)
    here = resolve(asked, resources=machine()).config
    plan = resolve(dataclasses.replace(asked, listen_ranks="10.0.0.1:9200"), resources=machine()).plan
    join = JoinConfig(host="10.0.0.1", port=9200, token_file=str(tmp_path / "cluster-token"))
    assert plan.node_replicas == NodeReplicas(number=1, most=1, join=join, has_first_here=True)
    assert (here.parallel.is_spread, plan.config.parallel.is_spread) == (False, True)
    assert (here.num_threads, plan.config.num_threads) == (1, 4)
    assert plan.config.kv_cache_bytes > 2.9 * here.kv_cache_bytes
    how = f"`moeflow join 10.0.0.1:9200`, with the token in {tmp_path / 'cluster-token'}"
    assert dict(plan.reasons)["other machines"] == f"a rank each, on 2 other machines that run {how}"


@needs_extension
def test_a_port_alone_listens_to_this_machine(model):
    asked = Settings(model=model, num_ranks=2, listen_ranks="9200", cluster_token_file=Path("/etc/token"))
    join = resolve(asked, resources=machine()).plan.node_replicas.join
    assert join == JoinConfig(host="127.0.0.1", port=9200, token_file="/etc/token")


@needs_extension
@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"listen_ranks": "9200"}, r"other machines \(--listen-ranks\) have nothing to do for one engine of one rank"),
        ({"listen_ranks": "9200", "num_ranks": 1}, "have nothing to do"),
        ({"listen_ranks": "here", "num_ranks": 2}, "'here' is no address: write HOST:PORT or PORT"),
        ({"ray_address": "auto"}, r"other machines \(--ray-address\) have nothing to do"),
        (
            {"ray_address": "auto", "num_ranks": 2, "listen_ranks": "9200", "is_served": False},
            "for `moeflow serve` and `moeflow batch` only",
        ),
        (
            {"ray_address": "ray://head:10001", "num_ranks": 2, "listen_ranks": "9200"},
            "an address for Ray's clients: make this machine a node .* --ray-address auto",
        ),
        ({"ray_address": "head", "num_ranks": 2, "listen_ranks": "9200"}, "'head' is no address: write HOST:PORT"),
        ({"ray_placement": "spread", "num_ranks": 2, "listen_ranks": "9200"}, r"set its address \(--ray-address\)"),
        ({"ray_placement": "near", "num_ranks": 2, "listen_ranks": "9200"}, "'near' is unknown; use one of strict-spr"),
    ],
)
def test_where_nobody_can_join_is_refused(model, settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        resolve(Settings(**({"model": model, "is_served": True} | settings)), resources=machine())


@needs_extension
def test_ray_starts_ranks_where_it_is_asked_to(model):
    asked = Settings(model=model, num_ranks=2, ray_address="head:6379", is_served=True)
    plan = resolve(asked, resources=machine()).plan
    join = plan.node_replicas.join
    assert (join.host, join.port, join.ray) == ("", 0, RayConfig(address="head:6379"))
    where = "on 1 other machine that Ray finds (head:6379, strict-spread)"
    assert dict(plan.reasons)["other machines"] == f"a rank each, {where}"
    packed = dataclasses.replace(asked, ray_placement="pack", num_replicas=3)
    plan = resolve(packed, resources=machine()).plan
    assert plan.config.parallel.is_spread
    assert (plan.node_replicas.number, plan.node_replicas.has_first_here) == (3, False)
    where = "on 6 other machines that Ray finds (head:6379, pack); 3 engines of 2 ranks"
    assert dict(plan.reasons)["other machines"] == f"a rank each, {where}"


@needs_extension
def test_ray_starts_replicas_that_are_each_planned_like_one_engine(model, tmp_path):
    asked = Settings(model=model, cache_dir=tmp_path, is_served=True)
    one = resolve(asked, resources=machine()).plan
    several = dataclasses.replace(asked, num_replicas=8, ray_address="auto")
    plan = resolve(several, resources=machine()).plan
    assert (plan.config, plan.num_replicas) == (one.config, 1)
    assert dict(plan.reasons)["other machines"] == "an engine each, on 8 other machines that Ray finds (auto)"
    join = JoinConfig(host="", port=0, token_file=str(tmp_path / "cluster-token"), ray=RayConfig(address="auto"))
    assert plan.node_replicas == NodeReplicas(number=8, most=8, join=join)
    assert plan_from_json(plan_to_json(plan), "plan.json") == plan
    at = dataclasses.replace(several, listen_ranks="10.0.0.1:9200")
    assert resolve(at, resources=machine()).plan.node_replicas.join.port == 9200
    by_hand = dataclasses.replace(asked, num_replicas=2, listen_ranks="9200")
    assert resolve(by_hand, resources=machine()).plan.node_replicas.join.ray is None
    growing = dataclasses.replace(several, max_replicas=20)
    assert resolve(growing, resources=machine()).plan.node_replicas.most == 20
    prompt = dataclasses.replace(growing, target_first_token_s=0.5)
    assert resolve(prompt, resources=machine()).plan.node_replicas.first_token_s == 0.5
    for more, complaint in (
        ({"target_first_token_s": 0.5}, r"set their most \(--max-replicas\)"),
        ({"max_replicas": 9, "target_first_token_s": 0.0}, "positive number of seconds, not 0"),
        ({"max_replicas": 7}, "7 replicas at most .* are fewer than the least, 8"),
        ({"max_replicas": 9, "ray_address": None}, "changes .* on a Ray cluster only"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            resolve(dataclasses.replace(several, **more), resources=machine())


@needs_extension
def test_a_model_larger_than_a_machine_fits_several(tmp_path):
    write_tiny_mixtral(tmp_path, hidden_size=128, intermediate_size=1024, num_local_experts=8)
    experts_bytes = 2 * 8 * 3 * 128 * 1024 * 4
    asked = Settings(model=str(tmp_path), dtype="float32", num_ranks=4, kv_cache_bytes=MIB)
    small = machine(PROCESS_BYTES + experts_bytes // 2)
    with pytest.raises(CapacityError, match="the weights need"):
        resolve(asked, resources=small)
    resolve(dataclasses.replace(asked, listen_ranks="9200"), resources=small)
    with pytest.raises(CapacityError, match="the weights need"):
        resolve(dataclasses.replace(asked, listen_ranks="9200", num_ranks=2), resources=small)


@needs_extension
def test_the_users_word_is_kept(model):
    resolved = resolve(
        Settings(
            model=model,
            model_name="mine",
            dtype="bfloat16",
            kv_dtype="bfloat16",
            device="cpu",
            num_threads=2,
            max_model_len=100,
            max_num_seqs=3,
            max_num_batched_tokens=50,
            kv_cache_bytes=1 * MIB,
            prefix_caching=False,
        ),
        resources=machine(),
    )
    config = resolved.config
    assert (config.model_name, config.weight_format, config.num_threads) == ("mine", "bfloat16", 2)
    assert config.kv_dtype == "bfloat16"
    assert (config.scheduler.max_model_len, config.scheduler.max_num_seqs) == (100, 3)
    assert config.kv_cache_bytes <= 1 * MIB
    assert config.scheduler.num_blocks == 1 * MIB // (2 * 2 * 2 * 8 * 2 * 16)
    assert resolved.plan.reasons == ()
    assert resolved.plan.forecast is None


@needs_extension
def test_the_kernels_compute_in_float32_with_weights_in_any_format(model):
    for format_wish, want in [({}, "float32"), ({"dtype": "bfloat16"}, "bfloat16"), ({"quantize": "int4"}, "int4")]:
        config = resolve(Settings(model=model, **format_wish), resources=machine()).config
        assert (config.dtype, config.weight_format, config.cpu_isa) == ("float32", want, extension.best_isa(""))
    assert config.embedding_format == "int8"
    assert resolve(Settings(model=model, cpu_isa="generic"), resources=machine()).config.cpu_isa == "generic"


def test_torch_computes_where_there_are_no_kernels(model, without_kernels):
    plan = resolve(Settings(model=model, dtype="bfloat16"), resources=machine()).plan
    config = plan.config
    assert (config.dtype, config.weight_format, config.cpu_isa) == ("bfloat16", "bfloat16", "")
    assert config.kv_dtype == "bfloat16"
    assert "torch computes" in dict(plan.reasons)["cpu_isa"]
    with pytest.raises(ConfigError, match="C\\+\\+ compiler"):
        resolve(Settings(model=model, quantize="int8"), resources=machine())


def test_a_shape_is_planned_for_where_there_are_no_kernels(monkeypatch, without_kernels):
    monkeypatch.setattr(extension, "ISAS", ())
    settings = Settings(model="mixtral-8x7b", memory_bytes=60 * GIB)
    here = machine(free=200 * GIB)
    config = resolve(settings, resources=here, needs_weights=False).config
    assert (config.device, config.weight_format) == ("cpu", "bfloat16")


@needs_extension
def test_an_unknown_instruction_set_is_refused(model):
    with pytest.raises(ConfigError, match=r"mmx.*generic, avx2"):
        resolve(Settings(model=model, cpu_isa="mmx"), resources=machine())


@pytest.mark.parametrize("kernels", [pytest.param(True, marks=needs_extension), False])
def test_little_memory_means_the_smaller_type_and_a_smaller_cache(model, monkeypatch, kernels):
    monkeypatch.setattr(extension, "is_available", lambda: kernels)
    config = resolve(Settings(model=model), resources=machine(free=PROCESS_BYTES + 150_000)).config
    assert config.weight_format == "bfloat16"
    assert config.scheduler.max_model_len == config.scheduler.num_blocks * config.scheduler.block_size < 512


@pytest.mark.parametrize(
    ("settings", "free", "words"),
    [
        ({}, PROCESS_BYTES // 2, "weights need .* are free: use "),
        ({"dtype": "float32"}, PROCESS_BYTES // 2, "--dtype bfloat16"),
    ],
)
def test_what_does_not_fit_says_need_have_and_remedy(model, settings, free, words):
    with pytest.raises(CapacityError, match=words):
        resolve(Settings(model=model, **settings), resources=machine(free=free))


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "int3"},
        {"quantize": "int3"},
        {"device": "abacus"},
        {"device": "cuda"},
    ],
)
def test_wishes_without_sense_are_refused(model, settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        resolve(Settings(model=model, **settings), resources=machine())


def test_device_memory_is_limited_where_there_is_a_device(model):
    with pytest.raises(ConfigError, match=r"--gpu-memory.*the CPU computes.*finds no CUDA device"):
        resolve(Settings(model=model, gpu_memory_bytes=GIB), resources=machine())
    with pytest.raises(ConfigError, match=r"--gpu-memory.*no GPU is asked for.*--memory"):
        resolve(Settings(model=model, device="cpu", gpu_memory_bytes=GIB), resources=machine())
    with_device = machine(accelerator="cuda", accelerator_free_bytes=4 * GIB)
    config = resolve(Settings(model=model, gpu_memory_bytes=GIB), resources=with_device).config
    assert (config.device, config.gpu_memory_bytes) == ("cuda", GIB)
    assert config.kv_cache_bytes < GIB
    with pytest.raises(CapacityError, match=r"device memory limit of 5\.0 GiB .* 4\.0 GiB are free"):
        resolve(Settings(model=model, gpu_memory_bytes=5 * GIB), resources=with_device)


def test_main_memory_is_limited_beside_a_gpu(model):
    with_device = machine(accelerator="cuda", accelerator_free_bytes=4 * GIB)
    for limits in ({}, {"gpu_memory_bytes": 2 * GIB}):
        asked = Settings(model=model, device="cuda", memory_bytes=GIB, **limits)
        config = resolve(asked, resources=with_device).config
        assert (config.device, config.memory_bytes) == ("cuda", GIB)
        assert config.memory.process_bytes < GIB
    with pytest.raises(CapacityError, match=r"beside a GPU needs .*, but 300\.0 MiB are allowed: raise .*--memory"):
        resolve(Settings(model=model, device="cuda", memory_bytes=300 * MIB), resources=with_device)
    assert resolve(Settings(model=model, memory_bytes=300 * MIB), resources=with_device).config.device == "cpu"


def test_what_this_process_holds_already_is_within_its_limit(model):
    config = resolve(
        Settings(model=model, memory_bytes=GIB), resources=machine(free=800 * MIB, process_bytes=300 * MIB)
    ).config
    assert config.memory_bytes == GIB


def test_a_missing_model_is_a_checkpoint_error(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        resolve(Settings(model=str(tmp_path / "nowhere")), resources=machine())


def test_this_machine_can_be_measured():
    here = host_resources()
    assert here.num_cores >= 1
    assert 0 < here.available_bytes <= here.total_bytes


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory) -> str:
    """32 experts of 1.5 MiB each."""
    folder = tmp_path_factory.mktemp("wide")
    write_tiny_mixtral(folder, intermediate_size=4096, num_local_experts=16)
    return str(folder)


HELD_BYTES = 200 * MIB  # by the process that decides
LIMITED = {"kv_dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 64}


def limited(model, folder, memory_bytes, **settings):
    return plan_limited(model, folder, memory_bytes, **settings).config


def plan_limited(model, folder, memory_bytes, **settings):
    overrides = {"model": model, "cache_dir": folder, "memory_bytes": memory_bytes, **LIMITED, **settings}
    return resolve(Settings(**overrides), resources=machine(process_bytes=HELD_BYTES)).plan


@pytest.fixture(scope="module")
def overhead_bytes(wide_model, tmp_path_factory) -> int:
    """What process and work space are planned to take."""
    plan = limited(wide_model, tmp_path_factory.mktemp("cache"), 2 * GIB).memory
    return plan.process_bytes + plan.work_bytes


@needs_extension
def test_experts_go_to_disk_if_the_memory_limit_asks_for_it(wide_model, tmp_path, overhead_bytes):
    roomy = limited(wide_model, tmp_path, overhead_bytes + 64 * MIB)
    assert roomy.experts is None
    assert roomy.memory_bytes == overhead_bytes + 64 * MIB
    plan = plan_limited(wide_model, tmp_path, overhead_bytes + 24 * MIB)
    tight = plan.config
    assert tight.experts is not None
    assert tight.weight_format == "float32"
    assert 4 == tight.experts.min_slots < tight.experts.num_slots <= 30
    assert tight.experts.policy == DEFAULT_POLICY
    assert f"up to {tight.experts.num_slots} of 32 in memory" in dict(plan.reasons)["experts"]
    assert tight.experts.packed_weights_file.startswith(str(tmp_path / "experts"))
    mine = limited(
        wide_model, tmp_path, overhead_bytes + 24 * MIB, packed_weights_file=tmp_path / "mine", expert_policy="lru"
    )
    assert (mine.experts.packed_weights_file, mine.experts.policy) == (str(tmp_path / "mine"), "lru")


@needs_extension
def test_passes_are_longer_where_each_reads_most_of_the_model_if_there_is_room(wide_model, tmp_path, monkeypatch):
    for module in (host_forecast, memory_budget):
        monkeypatch.setattr(module, "work_bytes", lambda shape, *, num_tokens, num_sampled: num_tokens * 2**10)
    overhead = limited(wide_model, tmp_path, 2 * GIB).memory.process_bytes

    def batch_tokens(left_bytes, **overrides):
        config = limited(wide_model, tmp_path, overhead + left_bytes, max_num_batched_tokens=None, **overrides)
        assert (config.experts is None) == (left_bytes > 60 * MIB)
        return config.scheduler.max_num_batched_tokens

    assert batch_tokens(32 * MIB) == 2048
    assert batch_tokens(20 * MIB) == 1024
    assert batch_tokens(12 * MIB) == 512
    assert batch_tokens(100 * MIB) == 512
    requested = limited(wide_model, tmp_path, overhead + 32 * MIB, max_num_batched_tokens=600)
    assert requested.scheduler.max_num_batched_tokens == 600


@needs_extension
def test_what_a_memory_limit_is_used_for_adds_up_to_it(wide_model, tmp_path, overhead_bytes):
    config = limited(wide_model, tmp_path, overhead_bytes + 24 * MIB)
    plan, experts, slot_bytes = config.memory, config.experts, config.experts.slab_bytes
    assert plan.process_bytes > HELD_BYTES
    assert plan.process_bytes + plan.work_bytes == overhead_bytes
    beside_kv = plan.process_bytes + plan.weight_bytes
    assert beside_kv + experts.num_slots * slot_bytes <= plan.limit_bytes
    assert beside_kv + (experts.num_slots + 3) * slot_bytes > plan.limit_bytes
    assert beside_kv + plan.work_bytes + config.kv_cache_bytes + experts.min_slots * slot_bytes <= plan.limit_bytes
    assert config.scheduler.num_kept_blocks == max(config.scheduler.num_blocks // 4, 1)
    asked = limited(wide_model, tmp_path, overhead_bytes + 24 * MIB, kv_cache_bytes=MIB)
    assert asked.scheduler.num_kept_blocks == asked.scheduler.num_blocks


@needs_extension
def test_a_network_that_predicts_takes_the_place_of_experts(wide_model, tmp_path, overhead_bytes, request):
    shape = PredictorShape(embedding_size=32, num_layers=2, num_experts=16, top_k=2)
    folder = predictor_folder(Path(wide_model))
    request.addfinalizer(lambda: shutil.rmtree(folder))  # others share the model
    predictor = ExpertPredictor(shape)
    with closing(open_checkpoint(Path(wide_model))) as checkpoint:
        save_predictor(predictor, checkpoint, folder, {})
    num_bytes = sum(4 * weight.numel() for weight in predictor.parameters())
    without = limited(wide_model, tmp_path, overhead_bytes + 24 * MIB)
    with_it = limited(wide_model, tmp_path, overhead_bytes + 24 * MIB, predictor="sida")
    assert 0 <= with_it.memory.process_bytes - without.memory.process_bytes - num_bytes < 4096
    lost = (without.experts.num_slots - with_it.experts.num_slots) * with_it.experts.slab_bytes
    assert lost >= num_bytes - with_it.experts.slab_bytes > 0


@needs_extension
def test_a_server_takes_its_own_share_of_the_limit(wide_model, tmp_path, overhead_bytes):
    alone = limited(wide_model, tmp_path, overhead_bytes + 24 * MIB)
    more = ENGINE_BYTES + HTTP_BYTES + margin_bytes(is_served=True) - margin_bytes(is_served=False)
    served = limited(wide_model, tmp_path, overhead_bytes + more + 24 * MIB, is_served=True)
    assert served.experts == alone.experts
    assert served.memory.is_served


@needs_extension
def test_a_memory_limit_below_the_least_is_refused(wide_model, tmp_path, overhead_bytes):
    with pytest.raises(CapacityError, match=r"4 experts at a time.* MiB are allowed.*--memory"):
        limited(wide_model, tmp_path, overhead_bytes + 3 * MIB)
    with pytest.raises(CapacityError, match="ask for less"):
        limited(wide_model, tmp_path, 20 * GIB)
    with pytest.raises(ConfigError, match="expert_policy 'best' is unknown"):
        limited(wide_model, tmp_path, overhead_bytes + MIB, expert_policy="best")
    with pytest.raises(ConfigError, match=r"no predictor of this model's experts in .*moeflow train predictor"):
        limited(wide_model, tmp_path, overhead_bytes + MIB, predictor="sida")
    with pytest.raises(CapacityError, match="come from disk"):
        resolve(Settings(model=wide_model), resources=machine(free=PROCESS_BYTES))


@needs_extension
@pytest.mark.parametrize(
    ("settings", "smaller"),
    [
        ({"dtype": "float32"}, "--dtype bfloat16 or a smaller model"),
        ({"dtype": "bfloat16"}, "--quantize int8 or a smaller model"),
        ({"quantize": "int4"}, "a smaller model"),
    ],
)
def test_remedies_for_too_little_memory_are_whole_sentences(wide_model, tmp_path, overhead_bytes, settings, smaller):
    with pytest.raises(CapacityError) as refused:
        limited(wide_model, tmp_path, overhead_bytes + MIB // 2, **settings)
    assert str(refused.value).endswith(f"Raise the memory limit (--memory), or use {smaller}")
    with pytest.raises(CapacityError, match=f"use {smaller}, or free memory"):
        resolve(Settings(model=wide_model, **settings), resources=machine(free=PROCESS_BYTES // 2))
