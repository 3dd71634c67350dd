"""What Prometheus reads: labels, lengths, ends and statuses of requests, the process, and vLLM's names."""

from __future__ import annotations

import importlib.metadata

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moeflow.core.engine_messages import EngineStats
from tests.server.fake_client import NAME, REPLY
from tests.server.live_server import eventually, serve_in_thread

pytestmark = pytest.mark.anyio

NOT_OF_A_MODEL = ("process_", "moeflow_build", "moeflow_http_", "moeflow_key_", "moeflow_requests_rejected")
NUM_REPLY = len(REPLY.encode()) + 1  # a token is a byte; and the end of sequence


async def families(http):
    return {it.name: it for it in text_string_to_metric_families((await http.get("/metrics")).text)}


def value(found, name, **labels):
    """Return the value of the one sample that has these labels."""
    samples = [sample for family in found.values() for sample in family.samples if sample.name == name]
    (one,) = (it.value for it in samples if it.labels.items() >= labels.items())
    return one


async def test_what_concerns_a_model_names_it(http):
    await http.post("/v1/completions", json={"prompt": "abc"})
    found = await families(http)
    assert len(found) > 50
    for name, family in found.items():
        label = "model_name" if name.startswith("vllm:") else "model"
        if not name.startswith(NOT_OF_A_MODEL):
            assert {sample.labels[label] for sample in family.samples} <= {NAME}, name
            assert family.samples or "rank" in name or "specul" in name or "lender" in name or "tree" in name, name


async def test_no_series_tells_when_a_counter_was_made(http):
    await http.post("/v1/completions", json={"prompt": "abc"})
    assert "_created" not in (await http.get("/metrics")).text


async def test_series_begin_at_zero(http):
    found = await families(http)
    for reason in ("stop", "length", "cancelled", "error"):
        assert value(found, "moeflow_sequences_finished_total", reason=reason) == 0
    assert value(found, "vllm:time_to_first_token_seconds_count", model_name=NAME) == 0


async def test_lengths_queue_and_ends_of_sequences(http, engine):
    await http.post("/v1/completions", json={"prompt": ["abc", "defgh"], "n": 2, "max_tokens": 99})
    await http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5})
    found = await families(http)
    assert value(found, "moeflow_sequence_prompt_tokens_count", model=NAME) == 5
    assert value(found, "moeflow_sequence_prompt_tokens_sum", model=NAME) == 2 * 3 + 2 * 5 + 3
    assert value(found, "moeflow_sequence_prompt_tokens_bucket", le="2.0") == 0
    assert value(found, "moeflow_sequence_prompt_tokens_bucket", le="5.0") == 5
    assert value(found, "moeflow_sequence_generated_tokens_sum", model=NAME) == 4 * NUM_REPLY + 5
    assert value(found, "moeflow_queue_time_seconds_sum", model=NAME) == 5 * 0.25
    assert value(found, "moeflow_sequences_finished_total", reason="stop") == 4
    assert value(found, "moeflow_sequences_finished_total", reason="length") == 1
    assert value(found, "moeflow_inter_token_latency_seconds_count", model=NAME) == 4 * (NUM_REPLY - 1) + 4


def test_a_client_that_leaves_cancels_its_sequences(app, engine):
    engine.pause_after = 3
    with serve_in_thread(app) as url:
        with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "abc", "n": 2, "stream": True}) as stream:
            next(stream.iter_lines())
        wanted = f'moeflow_sequences_finished_total{{model="{NAME}",reason="cancelled"}} 2.0'
        assert eventually(lambda: wanted in httpx.get(f"{url}/metrics").text)


async def test_http_requests_by_endpoint_and_status(http):
    await http.post("/v1/completions", json={"prompt": "abc"})
    await http.post("/v1/completions", json={"prompt": ""})
    await http.get("/v1/models/some/name")
    await http.get("/nothing/of/many")
    await http.request("BREW", "/v1/models")
    await http.get("/health", headers={"host": "evil.example"})
    await http.get("/")  # the page's files are no endpoints
    samples = (await families(http))["moeflow_http_requests"].samples
    assert {(*(it.labels[name] for name in ("endpoint", "method", "status")), it.value) for it in samples} == {
        ("/v1/completions", "POST", "200", 1),
        ("/v1/completions", "POST", "400", 1),
        ("/v1/models/{name:path}", "GET", "404", 1),
        ("other", "GET", "404", 1),
        ("/v1/models", "other", "405", 1),
        ("/health", "GET", "403", 1),
        ("other", "GET", "200", 1),
    }


async def test_the_process_and_its_version(http):
    found = await families(http)
    process = psutil.Process()
    assert value(found, "process_resident_memory_bytes") == pytest.approx(process.memory_info().rss, rel=0.2)
    assert value(found, "process_start_time_seconds") == pytest.approx(process.create_time(), abs=2)
    assert value(found, "process_open_fds") > 0
    version = importlib.metadata.version("moeflow")
    assert value(found, "moeflow_build_info", version=version) == 1
    assert (await http.get("/version")).json() == {"version": version}


async def test_vllms_names_have_the_same_values(http, engine):
    engine.snapshot = EngineStats(
        num_waiting=3,
        num_running=4,
        kv_blocks_total=100,
        kv_blocks_used=25,
        prompt_tokens_total=500,
        prefix_hit_tokens_total=48,
        generated_tokens_total=777,
        preemptions_total=5,
    )
    await http.post("/v1/completions", json={"prompt": ["abc", "de"], "max_tokens": 5})
    found = await families(http)
    of_model = {"model_name": NAME, "engine": "0"}
    expected = {
        "vllm:num_requests_running": 4,
        "vllm:num_requests_waiting": 3,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prompt_tokens_total": 548,
        "vllm:generation_tokens_total": 777,
        "vllm:prefix_cache_queries_total": 548,
        "vllm:prefix_cache_hits_total": 48,
        "vllm:num_preemptions_total": 5,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:inter_token_latency_seconds_count": 8,
        "vllm:request_time_per_output_token_seconds_count": 2,
        "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:request_queue_time_seconds_sum": 0.5,
        "vllm:request_prompt_tokens_sum": 5,
        "vllm:request_generation_tokens_sum": 10,
    }
    assert {name: value(found, name, **of_model) for name in expected} == expected
    assert value(found, "vllm:request_success_total", finished_reason="length", **of_model) == 2
    assert value(found, "vllm:request_prompt_tokens_bucket", le="2.0", **of_model) == 1
    kinds = {name: family.type for name, family in found.items() if name.startswith("vllm:")}
    assert kinds["vllm:num_requests_running"] == "gauge"
    assert kinds["vllm:request_success"] == kinds["vllm:prompt_tokens"] == "counter"
    assert kinds["vllm:time_to_first_token_seconds"] == "histogram"
