"""The served plan's figures, from the model's own files and by another way."""

from __future__ import annotations

import dataclasses

import pytest
from safetensors import safe_open

from moeflow.core.observation import PassGroup
from moeflow.core.plan import plan_to_json
from moeflow.kernels.cpu import extension
from moeflow.planner.hardware.hardware_json import machine_to_json
from moeflow.planner.hardware.this_machine import machine_file
from moeflow.planner.planning import plan_for_start
from moeflow.planner.served import advice_process
from moeflow.planner.served.advice import advise
from moeflow.planner.served.command_line import serve_command
from moeflow.planner.served.operating_point import decoding_point, operating_point, pass_work
from moeflow.planner.served.served_estimate import served_estimate
from moeflow.planner.usage import SERVING
from moeflow.settings.settings import Settings
from tests.planner.examples import machine
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
READ_BYTES_PER_S, FLOPS_PER_S = 1e10, 1e11  # of the example machine
HIDDEN, LAYERS, TOP_K, EXPERTS, VOCAB = 64, 2, 2, 4, 258
ONE = PassGroup(num_tokens=1, num_sampled=1, num_sequences=1, age_s=0.0, num_passes=1, seconds=0.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    write_tiny_mixtral(folder, hidden_size=HIDDEN, intermediate_size=96)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Return a cache folder with a description of this machine."""
    folder = tmp_path_factory.mktemp("cache")
    file = machine_file(folder, 1)
    file.parent.mkdir()
    file.write_text(machine_to_json(machine(ram=2 * 10**9)))
    return folder


@pytest.fixture(scope="module")
def settings(model, cache):
    return Settings(model=str(model), num_threads=1, cache_dir=cache, is_served=True, max_num_seqs=8)


@pytest.fixture(scope="module")
def plan(settings):
    return plan_for_start(settings, SERVING)


@pytest.fixture(scope="module")
def estimate(plan):
    return served_estimate(plan)


@pytest.fixture(scope="module")
def num_values(model):
    """Count the weights that a token reads, from the checkpoint's header."""
    with safe_open(model / "model.safetensors", "numpy") as file:
        sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118  # no dictionary
    matrices = {name: shape[0] * shape[1] for name, shape in sizes.items() if len(shape) == 2}
    experts = sum(count for name, count in matrices.items() if ".experts." in name)
    others = sum(count for name, count in matrices.items() if ".experts." not in name and "embed_tokens" not in name)
    return others + experts * TOP_K // EXPERTS


def test_a_token_reads_its_share_of_the_checkpoint_and_computes_two_operations_with_each_value(estimate, num_values):
    work = pass_work(estimate.costs, None, ONE, float(TOP_K))
    assert work.num_bytes == 4 * num_values  # the tiny model is stored in float32
    assert work.num_flops == 2 * num_values
    assert (work.memory_s, work.compute_s) == (None, None)


def test_keys_and_values_of_the_context_are_read_too(estimate, num_values):
    group = dataclasses_like(ONE, num_seen=10, num_read=10)
    work = pass_work(estimate.costs, None, group, float(TOP_K))
    kv_bytes = LAYERS * 2 * (HIDDEN // 2) * 4  # two of four heads have keys and values
    assert work.num_bytes == 4 * num_values + 10 * kv_bytes
    assert work.num_flops == 2 * num_values + LAYERS * 2 * 2 * HIDDEN * 10


def dataclasses_like(group, **changes):
    return PassGroup(**{name: getattr(group, name) for name in group.__struct_fields__} | changes)


def test_a_point_lies_where_bytes_operations_and_time_put_it(estimate, num_values):
    counted = dataclasses_like(ONE, distinct=float(TOP_K), num_counted=1, num_generated=1)
    point = operating_point(estimate, [counted])
    num_bytes, num_flops = 4 * num_values, 2 * num_values
    assert point.intensity == num_flops / num_bytes == 0.5
    assert point.flops_per_s == num_flops / 0.5
    assert point.bytes_per_s == num_bytes / 0.5
    assert point.share_of_roof == pytest.approx(num_bytes / READ_BYTES_PER_S / 0.5)
    assert (point.bound, point.generated_per_s, point.distinct_experts) == ("memory", 2.0, TOP_K)


def test_two_engines_share_the_roof_of_their_machine(estimate):
    one, two = operating_point(estimate, [ONE]), operating_point(estimate, [ONE, ONE], 2)
    assert two.pass_s == one.pass_s
    assert two.flops_per_s == 2 * one.flops_per_s
    assert two.share_of_roof == pytest.approx(2 * one.share_of_roof)


def test_many_tokens_of_a_pass_are_bound_by_arithmetic(estimate):
    many = dataclasses_like(ONE, num_tokens=4000, num_sequences=1, num_seen=4000, num_read=4000)
    point = operating_point(estimate, [many])
    assert point.bound == "compute"
    assert point.work.compute_s == pytest.approx(point.work.num_flops / FLOPS_PER_S)


@pytest.mark.parametrize(("wait", "bound"), [({"stall_s": 0.3}, "disk"), ({"waited_s": 0.3}, "exchange")])
def test_waits_bind_that_take_most_of_the_time(estimate, wait, bound):
    assert operating_point(estimate, [dataclasses_like(ONE, **wait)]).bound == bound


def test_experts_that_nobody_counted_are_not_told_as_counted(estimate):
    point = operating_point(estimate, [ONE])
    assert point.distinct_experts is None
    assert point.expected_experts == TOP_K


def test_predictions_are_those_of_the_plan(estimate, plan):
    forecast, workload = plan.forecast, plan.workload
    at = workload.prompt_len, workload.gen_len
    alone = estimate.estimator.predict(1, *at)
    assert 1 / alone.decode_s == pytest.approx(forecast.decode_alone_tokens_per_s.value)
    assert estimate.first_token_s(workload.prompt_len) == pytest.approx(forecast.time_to_first_token_s.value)
    together = estimate.estimator.predict(forecast.policy.batch_size, *at)
    assert together.decode_s == pytest.approx(forecast.time_per_token_s.value)
    point = decoding_point(estimate, 1, workload.mean_context, alone.decode_s)
    assert point.generated_per_s == pytest.approx(forecast.decode_alone_tokens_per_s.value)


def test_memory_grows_with_keys_and_values_alone(estimate):
    few, many = estimate.memory_bytes(16), estimate.memory_bytes(1016)
    assert many - few == 1000 * estimate.costs.kv_bytes
    assert few > estimate.costs.model_bytes


def test_a_machine_that_was_never_measured_is_unknown_with_the_reason(plan, tmp_path):
    elsewhere = dataclasses.replace(plan, settings={**plan.settings, "cache_dir": str(tmp_path)})
    estimate = served_estimate(elsewhere)
    assert estimate.machine is estimate.estimator is None
    assert estimate.step_s(1, 10) is estimate.first_token_s(5) is estimate.memory_bytes(0) is None
    assert "moeflow plan" in estimate.why_no_machine
    assert "moeflow plan" in estimate.why_no_estimator
    point = operating_point(estimate, [ONE])
    assert point.share_of_roof is point.roof_s is point.bound is None
    assert point.flops_per_s > 0


@pytest.fixture(scope="module")
def advised(plan):
    return advice_process.report(advice_process.AdviceOrder(plan_to_json(plan), "tiny")).advice


@pytest.mark.slow
def test_advice_compares_whole_plans(plan, settings, advised):
    found = {it.option or it.change: it for it in advised}
    other = plan_for_start(dataclasses.replace(settings, quantize="int8"), SERVING).forecast
    now = plan.forecast
    int8 = found["--quantize int8"]
    assert int8.kind == "option"
    assert int8.alone_tokens_per_s == pytest.approx(other.decode_alone_tokens_per_s.value)
    faster = other.decode_alone_tokens_per_s.value / now.decode_alone_tokens_per_s.value
    assert int8.speedup_alone == pytest.approx(faster)
    words = "moeflow serve tiny --quantize int8 --threads 1 --max-num-seqs 8"
    assert sorted(int8.command.split()) == sorted(words.split())
    together = now.decode_tokens_per_s.value / now.decode_alone_tokens_per_s.value
    assert found["8 requests at once"].speedup_full == pytest.approx(together)
    assert found["RAM that is read twice as fast"].kind == "machine"


@pytest.mark.slow
def test_the_best_advice_comes_first_and_what_brings_nothing_is_left_out(advised):
    gains = [it.gain for it in advised]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) >= 1.02


@pytest.mark.slow
def test_a_format_that_the_user_chose_stays(settings):
    chosen = plan_for_start(dataclasses.replace(settings, quantize="int8"), SERVING)
    assert not [it for it in advise(chosen, "tiny") if it.kind == "option"]


def test_a_plan_that_cannot_be_made_again_is_answered_with_the_reason(plan, tmp_path):
    gone = dataclasses.replace(plan, settings={**plan.settings, "model": str(tmp_path / "gone")})
    failed = advice_process.report(advice_process.AdviceOrder(plan_to_json(gone), "tiny"))
    assert failed.advice == []
    assert "gone" in failed.problem


def test_a_command_names_settings_but_no_file(tmp_path):
    settings = Settings(
        model="/secret/place",
        quantize="int8",
        memory_bytes=512 << 20,
        kv_cache_bytes=1000,
        prefix_caching=False,
        speculators=("suffix",),
        record_routing=str(tmp_path / "routing"),
        is_served=True,
    )
    command = serve_command(settings, "org/a model")
    assert command.startswith("moeflow serve 'org/a model' ")
    for part in ("--quantize int8", "--memory 512MiB", "--kv-cache 1000", "--no-prefix", "--speculator suffix"):
        assert part in command
    assert "secret" not in command
    assert str(tmp_path) not in command
    assert serve_command(Settings(), "") == "moeflow serve"
