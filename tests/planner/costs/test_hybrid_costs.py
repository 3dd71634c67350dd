"""Costs of experts on a device and its host, against sums by hand, simulated routers and a search by trial."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moeflow.core.hardware import DEVICE, RAM
from moeflow.core.plan import Workload
from moeflow.planner.costs.gpu_work_space import graph_bytes, pass_bytes
from moeflow.planner.costs.hybrid_costs import HybridCosts, hybrid_policy_of
from moeflow.planner.costs.hybrid_sizes import Passes
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from moeflow.planner.costs.process_memory import PROCESS_BYTES
from moeflow.planner.costs.routing_profile import RoutingProfile
from moeflow.planner.model_files import opened_model
from tests.planner.examples import HALF, SHORT, machine, small_model

MB = 10**6
with opened_model("qwen3-30b-a3b", needs_weights=False) as (_, QWEN3_30B_A3B):
    pass
WIDE = ModelCosts(QWEN3_30B_A3B, HALF)


def hybrid(costs: ModelCosts = WIDE, host_format: str = "bfloat16", **others) -> HybridCosts:
    fields = {"workload": SHORT, "process_bytes": 0, "host_format": host_format, **others}
    return HybridCosts(fields.pop("where", machine(ram=10**12, device=10**10)), costs, **fields)


def without_tokens():
    """Return a machine whose engine delivers tokens in no time."""
    where = machine(ram=10**12, device=10**10)
    ram = where.level(RAM)
    fast = dataclasses.replace(ram, processor=dataclasses.replace(ram.processor, token_s=0.0))
    return dataclasses.replace(where, levels=tuple(fast if it is ram else it for it in where.levels))


def test_a_step_of_one_sequence_reads_the_chosen_experts_where_they_are():
    model, number = hybrid(), 32
    step = model.decode_pass(1, number)
    layers, top_k = 48, 8
    expert_bytes = 3 * 2048 * 768 * 2
    cold_s = layers * top_k * 0.75 * expert_bytes / 1e10  # RAM is read with 10 GB/s
    hot_s = layers * top_k * 0.25 * expert_bytes / 1e11
    assert step.busy["host"] == pytest.approx(cold_s)
    without = WIDE.layers_bytes - WIDE.experts_bytes + QWEN3_30B_A3B.vocab_size * 2048 * 2
    kv_bytes = SHORT.mean_context * WIDE.kv_bytes
    others_s = (without + kv_bytes) / 1e11
    assert step.busy["device"] == pytest.approx(others_s + hot_s, rel=0.01)
    row_bytes = 2048 * 4
    link_s = layers * (2 * row_bytes + top_k * 8) / 1e9
    beside_s = 48 * 3e-5 + 1e-4 + 1e-5  # seams, the pass and its token
    assert step.seconds == pytest.approx(others_s + cold_s + link_s + beside_s, rel=0.01)
    tokens_s = (
        model.decode_pass(9, number).busy["device"]
        - hybrid(where=without_tokens()).decode_pass(9, number).busy["device"]
    )
    assert tokens_s == pytest.approx(9 * 1e-5)


@pytest.mark.parametrize("num_tokens", [1, 3, 17, 200])
@pytest.mark.parametrize("num_gpu_experts", [0, 5, 40, 64])
def test_used_experts_are_those_of_simulated_routers(num_tokens, num_gpu_experts):
    costs = dataclasses.replace(WIDE, shape=WIDE.shape.with_fields(num_experts=64, top_k=6))
    model = hybrid(costs)
    on_device, on_host = model._chosen(num_tokens, num_gpu_experts)
    rng, hot, cold = np.random.default_rng(0), [], []
    for _ in range(400):
        used = {expert for _ in range(num_tokens) for expert in rng.permutation(64)[:6]}
        hot.append(sum(expert < num_gpu_experts for expert in used))
        cold.append(len(used) - hot[-1])
    assert on_device.distinct == pytest.approx(np.mean(hot), abs=0.25)
    assert on_host.distinct == pytest.approx(np.mean(cold), abs=0.25)
    assert on_device.pairs + on_host.pairs == pytest.approx(6 * num_tokens)


def test_popular_experts_on_the_device_leave_less_to_the_host():
    skewed = RoutingProfile(cold=(0.01, 0.05, 0.1, 0.3, 0.7))
    even, by_popularity = hybrid(), hybrid(routing=skewed)
    half = 64  # of 128 experts: a tenth of all choices falls upon the other half
    assert by_popularity._chosen(1, half)[1].pairs == pytest.approx(0.1 * 8)
    assert by_popularity.decode_pass(1, half).seconds < even.decode_pass(1, half).seconds
    for number in (0, 128):
        assert by_popularity.decode_pass(4, number).seconds == pytest.approx(even.decode_pass(4, number).seconds)


@pytest.mark.parametrize("batch_size", [1, 8, 64])
def test_the_device_has_as_many_experts_as_make_steps_fastest(batch_size):
    model = hybrid()
    steps = [model.decode_pass(batch_size, number).seconds for number in range(129)]
    for most in (0, 60, 127):
        found = model.best_gpu_experts(batch_size, most)
        assert steps[found] == min(steps[: most + 1])
        assert found == most or most == 127  # the host is ten times slower, but not endlessly


@pytest.mark.parametrize("link", [1e9, 5e9])
@pytest.mark.parametrize("num_gpu_experts", [0, 60])
def test_experts_are_copied_from_the_first_pass_on_that_is_faster_so(link, num_gpu_experts):
    model = hybrid(where=machine(ram=10**12, device=10**10, link=link))
    found = model.stream_tokens(num_gpu_experts, 4096)
    faster = [tokens for tokens in (*range(1, 600), *range(600, 4097, 97)) if model._streams(tokens, num_gpu_experts)]
    assert faster, "both links are fast enough for some pass"
    assert found <= faster[0] < found + 97
    assert not model._streams(found - 1, num_gpu_experts)
    assert model.stream_tokens(num_gpu_experts, found - 1) == 0


def test_a_long_prompt_takes_the_faster_way():
    assert hybrid(where=machine(ram=10**12, device=10**10, link=1e13)).stream_tokens(0, 99) == 1
    long = Workload(prompt_len=2048, gen_len=2, max_prompt_len=2048)
    slow, fast = (hybrid(where=machine(ram=10**12, device=10**10, link=link), workload=long) for link in (1e6, 1e11))
    policy = hybrid_policy_of(slow.costs, 1, 16)
    assert slow.predict(policy).prefill_busy["host"] > 0
    assert fast.predict(policy).prefill_busy["host"] == 0
    assert fast.predict(policy).first_token_s < slow.predict(policy).first_token_s


def test_memory_has_all_experts_on_the_host_and_some_on_the_device():
    model = hybrid()
    none, some = (model.memory_of(hybrid_policy_of(model.costs, 3, number)) for number in (0, 10))
    expert_bytes = 3 * 2048 * 768 * 2
    assert some[DEVICE] - none[DEVICE] == 48 * 10 * expert_bytes
    assert some[RAM] == none[RAM] == pytest.approx(48 * 128 * expert_bytes, rel=0.01)
    kv_bytes = 3 * 160 * WIDE.kv_bytes  # whole blocks
    work = pass_bytes(WIDE, num_tokens=2048, num_sampled=3) + graph_bytes(WIDE, 3)
    beside = PROCESS_BYTES + work + (1 + 2 * 7 + 2 * 7 + 7) * expert_bytes  # sets of 7 of 9.4 MB in 64 MiB
    assert none[DEVICE] == pytest.approx(WIDE.model_bytes - WIDE.experts_bytes + kv_bytes + beside)


def test_the_host_may_hold_experts_in_a_larger_format():
    formats = Formats(matrices="float16", embeddings="float16", kv="bfloat16", activation_bytes=2)
    narrow, wide = (hybrid(ModelCosts(QWEN3_30B_A3B, formats), host_format=it) for it in ("bfloat16", "float32"))
    policy = hybrid_policy_of(narrow.costs, 1, 0)
    assert wide.memory_of(policy)[RAM] == pytest.approx(2 * narrow.memory_of(policy)[RAM], rel=0.01)
    assert wide.decode_pass(1, 0).busy["host"] == pytest.approx(2 * narrow.decode_pass(1, 0).busy["host"])


def test_a_prediction_adds_up_prompts_and_steps():
    where = machine(ram=10**12, device=10**10, link=4e9)
    back = next(it for it in where.links if it.source == DEVICE)
    slower = dataclasses.replace(back, rates=(dataclasses.replace(back.rates[0], bytes_per_s=5e7),))
    where = dataclasses.replace(where, links=(*(it for it in where.links if it is not back), slower))
    load = Workload(prompt_len=700, gen_len=9, max_prompt_len=700)
    model = hybrid(where=where, workload=load, process_bytes=12345)
    policy = hybrid_policy_of(WIDE, 5, 30)
    found, step = model.predict(policy), model.decode_pass(5, 30)
    assert (found.decode_s, found.busy) == step
    assert found.tokens_per_s == pytest.approx(5 * 9 / (found.prefill_s + 8 * found.decode_s))
    sizes = model.sizes.host_bytes(Passes(2048, 5))
    assert found.memory[RAM] == sizes + 12345
    row_bytes = 2048 * 4
    assert step.busy["link to device"] == pytest.approx(48 * 5 * row_bytes / 4e9)
    assert step.busy["link from device"] == pytest.approx(48 * 5 * (row_bytes + 8 * 8) / 5e7)
    one = hybrid(where=where, workload=Workload(prompt_len=1750, gen_len=1, max_prompt_len=1750))
    assert found.prefill_s == pytest.approx(
        2 * one.predict(policy_alone := hybrid_policy_of(WIDE, 1, 30)).prefill_s, rel=0.02
    )
    assert found.first_token_s == pytest.approx(model.predict(policy_alone).prefill_s)


def test_a_streamed_pass_copies_all_experts_without_a_slot():
    model = hybrid(where=machine(ram=10**12, device=10**10, link=1e9))
    attention = WIDE.prefill_attention(1, 4096)
    found = model._streamed(4096, attention, 1, 100)
    expert_bytes = 3 * 2048 * 768 * 2
    assert found.busy["link to device"] == pytest.approx(48 * 28 * expert_bytes / 1e9)
    device_s = found.busy["device"]
    waits = max(device_s, 47 * 28 * expert_bytes / 1e9)
    assert found.seconds == pytest.approx(waits + 28 * expert_bytes / 1e9 + 48 * 3e-5)
    assert device_s > WIDE.experts_bytes / 1e11


def test_other_policies_cost_what_a_device_alone_takes():
    where = machine(ram=10**9, device=900 * MB)
    plain = small_model(where)
    both = HybridCosts(where, plain.costs, SHORT, process_bytes=0, host_format="bfloat16")
    policy = dataclasses.replace(hybrid_policy_of(both.costs, 2, 8), num_gpu_experts=None)
    assert both.predict(policy) == plain.predict(policy)
    assert both.memory_of(policy) == plain.memory_of(policy)


def test_experts_in_no_slot_are_read_from_disk():
    layers, top_k, num_experts, number = 48, 8, 128, 32
    expert_bytes, read_s = 3 * 2048 * 768 * 2, 3 * 2048 * 768 * 2 / 5e8
    num_slots = layers * 48  # beside 32 on the device: 48 of 128 have none
    model, all_there = hybrid(num_host_slots=num_slots), hybrid()
    policy = hybrid_policy_of(WIDE, 1, number, on_disk=model.on_disk(number))
    assert policy.experts_on_disk == pytest.approx(48 / num_experts)
    num_read = layers * top_k * 48 / num_experts
    step, without = model.decode_pass(1, number), all_there.decode_pass(1, number)
    assert step.busy["disk"] == pytest.approx(num_read * read_s)
    stops_s = layers * (1 - (1 - 48 / num_experts) ** top_k) * 1e-3
    assert step.seconds - without.seconds == pytest.approx(num_read * (read_s + 1e-4) + stops_s)
    used = model.memory_of(policy)
    assert used[RAM] == pytest.approx(
        (num_slots + 1 + 2 * 7) * expert_bytes + 4 * 2048 * 2048 * 4, rel=1e-3
    )  # two sets on their way
    assert used["disk"] == pytest.approx(layers * 48 * expert_bytes)
    assert used[DEVICE] == all_there.memory_of(policy)[DEVICE]
    prompt = model._streamed(4000, WIDE.prefill_attention(1, 4000), 1, number)
    assert prompt.seconds == pytest.approx(layers * 48 * read_s, rel=0.05)
    enough = hybrid(num_host_slots=layers * (num_experts - number))
    assert enough.on_disk(number) == 0
    assert enough.decode_pass(1, number) == without


def test_an_expert_from_disk_has_the_hosts_format():
    narrow = ModelCosts(QWEN3_30B_A3B, dataclasses.replace(HALF, matrices="float16"))
    bytes_of = [hybrid(narrow, name, num_host_slots=0).read_expert_bytes for name in ("bfloat16", "float32")]
    assert bytes_of == [3 * 2048 * 768 * 2, 3 * 2048 * 768 * 4]
