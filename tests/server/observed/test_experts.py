"""`GET /stats/experts` of a real server: the choices of routers, however tokens are computed."""

from __future__ import annotations

import asyncio

import httpx
import msgspec
import numpy as np
import pytest
from httpx import AsyncClient
from prometheus_client.parser import text_string_to_metric_families

from moeflow.core.observation import ExpertQuestion, ExpertSight, RoutedTokens, Watch
from moeflow.engine.generator import Generator
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from moeflow.server.expert_sums import sum_of_tokens
from tests.server.conftest import connect
from tests.server.fake_client import NAME, FakeClient
from tests.server.live_server import eventually
from tests.server.server_process import LONG, Server
from tests.tiny_mixtral import write_tiny_mixtral

LAYERS, EXPERTS, TOP_K = 3, 5, 2


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, num_hidden_layers=LAYERS, num_local_experts=EXPERTS, max_position_embeddings=8192)
    server = Server(folder).wait_until_ready()
    yield server
    server.process.terminate()
    server.process.communicate(timeout=60)
    assert server.process.returncode == 0


def get(server: Server, path: str) -> dict:
    return httpx.get(server.url + path, timeout=10).raise_for_status().json()


def begin_and_leave(server: Server, **changes) -> None:
    """Read the first token of an answer, and then close the connection."""
    body = LONG | {"stream": True} | changes
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())


def check_sums(found: dict) -> None:
    for name in ("total", "last_pass", "last_minute"):
        routed = found[name]
        assert [sum(row) for row in routed["counts"]] == [TOP_K * routed["tokens"]] * LAYERS
        assert routed["tokens_of_layers"] == [routed["tokens"]] * LAYERS


@pytest.mark.slow
def test_counts_are_the_computed_tokens_of_a_real_server(server):
    begun = get(server, "/stats/experts")
    assert begun["layers"] == list(range(LAYERS))
    assert (begun["num_experts"], begun["top_k"], begun["is_counting"]) == (EXPERTS, TOP_K, True)
    assert begun["total"] == {"tokens": 0, "tokens_of_layers": [0] * LAYERS, "counts": [[0] * EXPERTS] * LAYERS}
    assert begun["residency"] == [[begun["tiers"].index("ram")] * EXPERTS] * LAYERS
    assert (begun["hits"], begun["misses"], begun["not_counted"]) == (None, None, "")
    prompts = [[*range(20, 90)], [*range(20, 60)], [7] * 5]
    for prompt in (*prompts, prompts[0]):  # the last finds its prefix
        assert server.post(prompt=prompt, max_tokens=12, n=2).status_code == 200
    begin_and_leave(server, prompt=[9] * 30)
    assert eventually(lambda: get(server, "/stats")["requests_cancelled_total"] == 1)
    found, stats = get(server, "/stats/experts"), get(server, "/stats")
    check_sums(found)
    ended = stats["requests_finished_total"] + stats["requests_cancelled_total"]
    # The last token of each sequence is an input of no pass.
    assert found["total"]["tokens"] == stats["prompt_tokens_total"] + stats["generated_tokens_total"] - ended
    assert stats["prefix_hit_tokens_total"] > 0
    assert found["total"] == found["last_minute"]
    assert found["replicas"] == []
    assert found["num_passes"] == stats["passes_total"]


@pytest.mark.slow
def test_prometheus_reads_the_same_numbers(server):
    server.post(max_tokens=4)
    text = httpx.get(server.url + "/stats/experts?format=prometheus").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = get(server, "/stats/experts")
    counted = np.zeros((LAYERS, EXPERTS), int)
    for sample in families["moeflow_expert_tokens"].samples:
        assert sample.name == "moeflow_expert_tokens_total"
        counted[int(sample.labels["layer"]), int(sample.labels["expert"])] = sample.value
    assert counted.tolist() == found["total"]["counts"]
    buckets = [it.value for it in families["moeflow_expert_load"].samples if it.name.endswith("_bucket")]
    (number,) = (it.value for it in families["moeflow_expert_load"].samples if it.name.endswith("_count"))
    assert buckets == sorted(buckets)
    assert buckets[-1] == number
    assert number > 0
    assert number % (LAYERS * EXPERTS) == 0


SIGHT = ExpertSight(
    layers=[1, 3],
    num_encoder_layers=1,
    num_experts=2,
    top_k=1,
    is_counting=True,
    counted_s=5.0,
    num_passes=4,
    total=RoutedTokens(6, [2, 4], np.array([[2, 0], [1, 3]], "<i8").tobytes()),
    last_pass=RoutedTokens(1, [0, 1], np.array([[0, 0], [0, 1]], "<i8").tobytes()),
    last_minute=RoutedTokens(6, [2, 4], np.array([[2, 0], [1, 3]], "<i8").tobytes()),
    load_bounds=[0.0, 1.0],
    loads=[1, 4, 3],
    residency=bytes([2, 3, 2, 2]),
    hits=np.array([[1, 2], [3, 4]], "<i8").tobytes(),
    misses=np.array([[4, 3], [2, 1]], "<i8").tobytes(),
    read_bytes=4096,
    stall_s=0.5,
    not_counted="",
)


@pytest.fixture
def client(tokenizer):
    return FakeClient(tokenizer)


def serving(client, tokenizer) -> AsyncClient:
    return connect(create_app(Generator(client, tokenizer), ServerConfig()))


@pytest.mark.anyio
async def test_replicas_are_summed_and_shown_by_themselves(client, tokenizer):
    other = msgspec.structs.replace(SIGHT, counted_s=7.0, residency=bytes(4), not_counted="2 passes: lost")
    client.sights = {0: SIGHT, 2: other}
    async with serving(client, tokenizer) as http:
        found = (await http.get("/stats/experts")).json()
    assert client.questions == [ExpertQuestion()]
    assert found["model"] == NAME
    assert found["layers"] == [1, 3]
    assert found["total"] == {"tokens": 12, "tokens_of_layers": [4, 8], "counts": [[4, 0], [2, 6]]}
    assert (found["hits"], found["misses"]) == ([[2, 4], [6, 8]], [[8, 6], [4, 2]])
    assert found["residency"] == [[2, 3], [2, 2]]
    assert (found["counted_s"], found["num_passes"]) == (7.0, 8)
    assert (found["read_bytes"], found["stall_s"], found["not_counted"]) == (8192, 1.0, "2 passes: lost")
    first, second = found["replicas"]
    assert first["total"]["counts"] == second["total"]["counts"] == [[2, 0], [1, 3]]
    assert second["residency"] == [[0, 0], [0, 0]]


@pytest.mark.anyio
async def test_an_engine_that_does_not_answer_is_busy(client, tokenizer):
    async with serving(client, tokenizer) as http:
        response = await http.get("/stats/experts")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_busy")
    assert response.headers["retry-after"] == "1"


@pytest.mark.anyio
async def test_layers_of_an_encoder_have_a_name_of_their_own(client, tokenizer):
    client.sights = {0: SIGHT}
    async with serving(client, tokenizer) as http:
        text = (await http.get("/stats/experts?format=prometheus")).text
    assert f'moeflow_expert_tokens_total{{expert="1",layer="3",model="{NAME}"}} 3.0' in text
    assert f'moeflow_expert_tokens_total{{expert="0",layer="encoder 1",model="{NAME}"}} 2.0' in text
    assert f'moeflow_expert_load_bucket{{le="1.0",model="{NAME}"}} 5.0' in text
    assert f'moeflow_expert_load_sum{{model="{NAME}"}} 8.0' in text


@pytest.mark.anyio
async def test_unknown_models_and_formats_are_refused(client, tokenizer):
    async with serving(client, tokenizer) as http:
        assert (await http.get("/stats/experts?model=other")).status_code == 404
        assert (await http.get("/stats/experts?format=xml")).status_code == 400
    assert client.questions == []


@pytest.mark.anyio
async def test_stats_make_engines_observe_only_if_asked(client, tokenizer):
    async with serving(client, tokenizer) as http:
        await http.get("/stats")
        assert client.questions == []
        for path in ("/stats?watch=true", f"/stats?watch=true&model={NAME}"):
            assert (await http.get(path)).status_code == 200
            await asyncio.sleep(0)  # the answer does not wait for the engine's
    assert client.questions == [Watch(), Watch()]


def test_a_sum_of_one_engine_is_its_own():
    assert sum_of_tokens([SIGHT.total]) is SIGHT.total
