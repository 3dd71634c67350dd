"""Plans for described machines with a device: an engine can run each as it is printed, and the forecast is that run's.

Bytes are added up from the configuration alone. Seconds are those of the pipeline's tasks on the virtual clock.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil

import pytest

from moeflow.core.errors import CapacityError
from moeflow.core.hardware import DEVICE, DISK, RAM
from moeflow.core.plan import RESIDENT, Workload, plan_from_json, plan_to_json
from moeflow.models.registry import read_bare_config
from moeflow.pipeline.catalog import OFFLOADING
from moeflow.planner import described
from moeflow.planner.choices.offload_plan import costs_of
from moeflow.planner.costs.cost_model import DEVICE_RESERVE_BYTES, PROCESS_BYTES
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from moeflow.planner.described import plan_described
from moeflow.planner.hardware.machine_files import load_machine, machine_names
from moeflow.planner.model_files import shipped_models
from moeflow.planner.simulator.pipeline_run import PipelineRun
from moeflow.planner.usage import Usage
from moeflow.settings.settings import Settings
from tests.marks import thorough_unless

MODELS = ("mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b", "mixtral-8x22b", "dbrx")
WORKLOADS = (
    Workload(prompt_len=418, gen_len=128, max_prompt_len=418),
    Workload(prompt_len=77, gen_len=32, max_prompt_len=418),
    Workload(prompt_len=1693, gen_len=64, max_prompt_len=1984),
)
TAKEN = {
    ("paper-s1", "mixtral-8x7b", 0),
    ("l4", "mixtral-8x7b", 0),
    ("l4", "qwen3-30b-a3b", 1),
    ("t4", "qwen3-30b-a3b", 2),
    ("a100-80g", "mixtral-8x7b", 2),
    ("h200", "mixtral-8x22b", 0),
    ("paper-s7", "dbrx", 1),
    ("t4", "mixtral-8x7b", 0),
}
CASES = thorough_unless(
    lambda *case: case in TAKEN,
    ((name, model, work) for name in machine_names() for model in MODELS for work in range(len(WORKLOADS))),
)
TOLERANCE = 0.05  # of the simulated seconds: what the search's linear bounds leave out
MOVING_TOLERANCE = 0.25  # likewise, where keys and values move: the link waits for them in part
SHARING_TOLERANCE = 0.4  # likewise, where the host computes experts: the bounds add up what overlaps in part


@pytest.fixture(autouse=True)
def pipelines_only(monkeypatch):
    monkeypatch.setattr(described, "can_be_hybrid", lambda *_: False)


def planned(name, model, work, goal="throughput", num_sequences=None):
    usage = Usage(workload=WORKLOADS[work], goal=goal, num_sequences=num_sequences)
    settings = Settings(model=str(shipped_models()[model]))
    return plan_described(settings, usage, lambda _: replace(load_machine(name), num_devices=1)).plan


def plan_or_refusal(name, model, work):
    try:
        return planned(name, model, work)
    except CapacityError as error:
        return error


def is_too_small(name, model):
    """Whether a host cannot hold the experts in 16 bits, or a device two layers' experts and all other weights.

    None: it depends on two layers more in the host, or on the work space.
    """
    formats = Formats(matrices="bfloat16", embeddings="bfloat16", kv="bfloat16", activation_bytes=2)
    costs, where = ModelCosts(read_bare_config(shipped_models()[model]), formats), load_machine(name)
    layer = costs.experts_bytes / costs.shape.num_layers
    on_device = costs.model_bytes - costs.experts_bytes + 2 * layer + DEVICE_RESERVE_BYTES
    have, on_host = {level.name: level.capacity_bytes for level in where.levels}, PROCESS_BYTES + costs.experts_bytes
    if on_host > have[RAM] or on_device > have[DEVICE]:
        return True
    return None if on_host + 3 * layer > have[RAM] or on_device * 1.1 > have[DEVICE] else False


def check_runs(plan, name, model):
    """Check an engine's limits, and its memory, without any figure of the search."""
    config, policy, where = plan.config, plan.forecast.policy, load_machine(name)
    assert plan_from_json(plan_to_json(plan), "it") == plan
    limits, workload = config.scheduler, plan.workload
    per_request = ceil(workload.max_tokens / limits.block_size)
    assert (limits.max_num_seqs, limits.num_blocks) == (policy.batch_size, policy.batch_size * per_request)
    assert limits.max_num_batched_tokens == max(policy.chunk_tokens, limits.max_num_seqs)
    assert limits.max_model_len == workload.max_tokens
    assert (config.experts, policy.experts_on_disk, policy.num_devices) == (None, 0.0, 1)
    assert DISK not in {used.tier for used in plan.forecast.memory}
    costs = costs_of(read_bare_config(shipped_models()[model]), config)
    have = {level.name: level.capacity_bytes for level in where.levels}
    if config.offload is None:
        assert (plan.pipeline, config.device, policy.is_resident) == (RESIDENT, "cuda:0", True)
        kv = limits.num_blocks * limits.block_size * costs.kv_bytes
        work = DEVICE_RESERVE_BYTES + costs.activation_bytes(limits.max_num_batched_tokens)
        assert costs.model_bytes + kv + work <= have[DEVICE]
        return
    check_offload(config, policy, costs, have, workload)


def check_offload(config, policy, costs, have, workload):
    offload, limits, shape = config.offload, config.scheduler, costs.shape
    num_layers, num_experts = shape.num_layers, shape.routing.num_experts
    block_bytes, per_request = limits.block_size * costs.kv_layer_bytes, ceil(workload.max_tokens / limits.block_size)
    pipeline = OFFLOADING[offload.pipeline]
    assert offload.micro_batch_tokens == policy.micro_batch
    assert offload.prompt_micro_batch_tokens == policy.prompts * workload.prompt_len
    assert policy.prompts >= max(policy.micro_batch // workload.prompt_len, 1)
    assert offload.num_resident_kv_layers == round(policy.kv_on_device * num_layers)
    assert policy.kv_on_device == offload.num_resident_kv_layers / num_layers
    if not pipeline.has_kv_on_host:
        assert (offload.num_resident_kv_layers, offload.window_blocks) == (num_layers, 0)
    elif pipeline.attends_on_host:
        assert (offload.num_resident_kv_layers, offload.window_blocks) == (0, policy.prompts * per_request)
    else:
        assert offload.num_resident_kv_layers < num_layers
        requests = max(policy.micro_batch, policy.prompts)
        assert offload.window_blocks == min(requests * per_request, limits.num_blocks)
    assert offload.num_hosted_experts == round(policy.experts_on_host * num_experts)
    assert offload.num_hosted_experts + offload.num_resident_experts <= num_experts
    assert not offload.num_hosted_experts or pipeline.make_sharing_tasks is not None
    outside = costs.model_bytes - costs.experts_bytes
    streamed = (num_experts - offload.num_resident_experts) * costs.expert_bytes  # of a layer
    staying = offload.num_resident_experts * num_layers * costs.expert_bytes
    assert policy.weights_on_device == pytest.approx(1 - streamed * num_layers / costs.layers_bytes)
    kv_layers = offload.num_resident_kv_layers
    windows = 2 * offload.window_blocks * block_bytes
    hidden = shape.hidden_size
    widest = 2 * hidden + max(shape.routing.top_k * (3 * shape.feed_forward.intermediate_size + hidden), shape.qkv_size)
    sizes = (offload.micro_batch_tokens, offload.prompt_micro_batch_tokens)
    largest = min(max(*sizes, limits.max_model_len), limits.max_num_batched_tokens)
    kept = hidden + max(shape.attended_size, hidden)
    activations = 2 * (largest * widest + limits.max_num_batched_tokens * kept)
    on_device = outside + staying + 2 * streamed + kv_layers * limits.num_blocks * block_bytes + windows + activations
    assert on_device <= offload.cuda.capacity_bytes < have[DEVICE]
    on_host = PROCESS_BYTES + costs.experts_bytes + 2 * streamed + windows
    on_host += (num_layers - kv_layers) * limits.num_blocks * block_bytes
    assert on_host <= have[RAM]


def check_forecast(plan, name, model):
    """Compare with the pipeline's own tasks."""
    if plan.config.offload is None:
        return
    policy, expected = plan.forecast.policy, plan.forecast
    run = PipelineRun(
        pipeline=OFFLOADING[plan.pipeline],
        machine=load_machine(name),
        costs=costs_of(read_bare_config(shipped_models()[model]), plan.config),
        workload=plan.workload,
        policy=policy,
    )
    tolerance = MOVING_TOLERANCE if plan.pipeline == "flexgen" else TOLERANCE
    if policy.experts_on_host:
        tolerance = SHARING_TOLERANCE
    assert expected.all_prompts_s.value == pytest.approx(run.prefill_s, rel=tolerance)
    assert expected.tokens_per_s.value == pytest.approx(run.tokens_per_s, rel=tolerance)
    if plan.workload.gen_len > 1:
        step_s = run.decode_s / (plan.workload.gen_len - 1)
        assert expected.time_per_token_s.value == pytest.approx(step_s, rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "model", "work"), CASES)
def test_a_plan_fits_and_takes_as_long_as_its_tasks(name, model, work):
    found, too_small = plan_or_refusal(name, model, work), is_too_small(name, model)
    assert too_small in (None, isinstance(found, CapacityError))
    if isinstance(found, CapacityError):
        assert re.search(r"at least .* of (device )?memory \(.* available\).*\. Take", str(found))
        return
    check_runs(found, name, model)
    check_forecast(found, name, model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model", "num_sequences"),
    [("paper-s1", "mixtral-8x7b", 1), ("l4", "qwen3-30b-a3b", 1), ("l4", "mixtral-8x7b", 64)],
)
def test_so_does_a_plan_for_few_sequences(name, model, num_sequences):
    plan = planned(name, model, 0, "latency", num_sequences)
    assert plan.config.scheduler.max_num_seqs == num_sequences
    check_runs(plan, name, model)
    check_forecast(plan, name, model)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "model", "number"), [("paper-s6", "mixtral-8x22b", 2), ("paper-s9", "dbrx", 4)])
def test_devices_share_a_model_that_none_of_them_holds(name, model, number):
    where, settings = load_machine(name), Settings(model=str(shipped_models()[model]))
    plan = plan_described(settings, Usage(workload=WORKLOADS[1], goal="throughput"), lambda _: where).plan
    config, policy, offload = plan.config, plan.forecast.policy, plan.config.offload
    assert plan_from_json(plan_to_json(plan), "it") == plan
    assert (policy.num_devices, config.parallel.num_ranks, plan.settings["num_ranks"]) == (number,) * 3
    assert dict(plan.reasons)["parallel degrees"] == f"data 1, tensor {number}, expert 1, pipeline 1"
    assert offload.num_hosted_experts == 0
    shape = read_bare_config(shipped_models()[model])
    own = costs_of(shape.with_fields(intermediate_size=shape.feed_forward.intermediate_size // number), config)
    streamed = (shape.routing.num_experts - offload.num_resident_experts) * own.expert_bytes
    staying = offload.num_resident_experts * shape.num_layers * own.expert_bytes
    assert staying + 2 * streamed < offload.cuda.capacity_bytes < where.level(DEVICE).capacity_bytes
    alone = planned_or_none(name, model, 1)
    assert alone is None or plan.forecast.tokens_per_s.value > alone.forecast.tokens_per_s.value
    check_forecast(plan, name, model)


def planned_or_none(name, model, work):
    found = plan_or_refusal(name, model, work)
    return None if isinstance(found, CapacityError) else found


def test_a_host_too_small_for_the_model_is_refused_with_its_need():
    with pytest.raises(CapacityError, match=r"needs at least .* of memory \(64.0 GiB available\).*--device cpu"):
        planned("t4", "mixtral-8x7b", 0)


def test_prompts_take_large_passes_where_each_streams_the_weights():
    plan = planned("paper-s1", "mixtral-8x7b", 0)
    config, policy = plan.config, plan.forecast.policy
    num_passes = ceil(policy.batch_size * 418 / config.scheduler.max_num_batched_tokens)
    assert config.scheduler.max_num_batched_tokens > 2 * policy.batch_size
    streamed_s = num_passes * 80e9 / 12e9  # of experts, as the machine's link moves them
    assert plan.forecast.all_prompts_s.value > streamed_s
