"""Stories with the passes of a real engine: their sums are those of the answers."""

from __future__ import annotations

import asyncio
import base64
from itertools import pairwise

import numpy as np
import pytest

from moeflow import LLM
from moeflow.core.observation import NOT_COMPUTED
from moeflow.engine.generator import Generator
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from tests.server.conftest import connect
from tests.server.stories.real_client import RealClient
from tests.tiny_mixtral import write_tiny_mixtral
from tests.token_trees import draft_always

pytestmark = pytest.mark.anyio
LAYERS, EXPERTS, TOP_K = 3, 4, 2
PROMPT = "Grüße an die Welt 🦊, heute und morgen."
BODY = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, num_hidden_layers=LAYERS)
    with LLM(str(folder), num_threads=1, speculators=("suffix",)) as llm:
        draft_always(llm._engine._speculation)
        yield llm


@pytest.fixture
async def http(llm):
    client = RealClient(llm)
    async with connect(create_app(Generator(client, llm.tokenizer), ServerConfig())) as http:
        http.client = client
        yield http
    llm._engine._end_observing()


async def get(http, path: str) -> dict:
    response = await http.get(path)
    assert response.status_code == 200, response.text
    return response.json()


async def ask(http, **changes) -> tuple[dict, str]:
    """Return an answer, and where its story is."""
    response = await http.post("/v1/completions", json=BODY | changes)
    assert response.status_code == 200, response.text
    return response.json(), f"/stats/requests/{response.headers['x-request-id']}"


async def watch(http) -> None:
    """Begin to watch: any story will do."""
    _, path = await ask(http, max_tokens=1)
    story = await get(http, path)
    assert story["passes"] is story["experts"] is story["read_bytes"] is story["stall_s"] is None
    assert "not observed" in story["not_observed"]


async def test_passes_and_experts_add_up(http):
    await watch(http)
    answer, path = await ask(http, prompt=f"Other. {PROMPT}")
    story, usage = await get(http, path), answer["usage"]
    assert (story["not_observed"], story["replica"], story["host"]) == ("", 0, "")
    passes = story["passes"]
    assert [one["is_prompt"] for one in passes].count(True) == 1
    assert passes[0]["is_prompt"]
    assert {one["tokens"] for one in passes[1:]} == {1}
    computed = usage["prompt_tokens"] - story["cached_tokens"] + usage["completion_tokens"] - 1
    assert sum(one["tokens"] + one["accepted_tokens"] for one in passes) == computed
    assert sum(one["drafted_tokens"] for one in passes) == story["drafted_tokens"]
    assert sum(one["accepted_tokens"] for one in passes) == story["accepted_tokens"]
    assert all(a["start_s"] + a["duration_s"] <= b["start_s"] for a, b in pairwise(passes))
    assert passes[-1]["start_s"] + passes[-1]["duration_s"] <= story["total_s"]
    experts = story["experts"]
    assert (experts["layers"], experts["num_experts"], experts["top_k"]) == ([*range(LAYERS)], EXPERTS, TOP_K)
    rows = sum(one["tokens"] + one["drafted_tokens"] for one in passes)
    assert [sum(row) for row in experts["counts"]] == [rows * TOP_K] * LAYERS


async def test_tokens_have_their_text_and_experts(http, llm):
    await watch(http)
    answer, path = await ask(http, prompt=f"Tokens. {PROMPT}", skip_special_tokens=False)
    found = await get(http, f"{path}/tokens")
    assert (found["layers"], found["num_experts"], found["top_k"]) == ([*range(LAYERS)], EXPERTS, TOP_K)
    tokens, usage = found["tokens"], answer["usage"]
    prompt = [token for token in tokens if token["role"] == "prompt"]
    assert len(prompt) == usage["prompt_tokens"]
    assert len(tokens) == usage["prompt_tokens"] + usage["completion_tokens"]
    assert "".join(token["text"] for token in prompt).endswith(PROMPT)
    assert "".join(token["text"] for token in tokens[len(prompt) :]) == answer["choices"][0]["text"]
    assert tokens[-1]["experts"] is None, "no token follows it"
    story = await get(http, path)
    cached = story["cached_tokens"]
    assert all(token["experts"] is None for token in tokens[:cached])
    assert all(token["experts"] is not None for token in tokens[cached:-1])
    chosen = np.array([np.frombuffer(base64.b64decode(it["experts"]), "<u2") for it in tokens[cached:-1]])
    chosen = chosen.reshape(-1, LAYERS, TOP_K)
    assert chosen.max() < EXPERTS < NOT_COMPUTED
    counted = [np.bincount(chosen[:, layer].ravel(), minlength=EXPERTS) for layer in range(LAYERS)]
    wrong_drafts = story["drafted_tokens"] - story["accepted_tokens"]
    assert (np.array(story["experts"]["counts"]) - counted).sum(axis=1).tolist() == [wrong_drafts * TOP_K] * LAYERS


async def test_sequences_share_passes(http):
    await watch(http)
    prompts = ["Both of them", "in one request"]
    answer, path = await ask(http, prompt=prompts, n=2, temperature=1, seed=3, skip_special_tokens=False)
    story = await get(http, path)
    assert (story["sequences"], story["not_observed"]) == (4, "")
    assert len(story["passes"]) < answer["usage"]["completion_tokens"]
    assert {one["tokens"] for one in story["passes"] if not one["is_prompt"]} <= {1, 2, 3, 4}
    least = answer["usage"]["total_tokens"] - story["cached_tokens"] - 4
    computed = sum(one["tokens"] + one["accepted_tokens"] for one in story["passes"])
    assert least <= computed <= least + answer["usage"]["prompt_tokens"], "usage counts the prompt of n answers once"
    texts = [await get(http, f"{path}/tokens?sequence={number}") for number in range(4)]
    for found, choice in zip(texts, sorted(answer["choices"], key=lambda choice: choice["index"]), strict=True):
        assert "".join(it["text"] for it in found["tokens"] if it["role"] == "answer") == choice["text"]
    assert (await http.get(f"{path}/tokens?sequence=4")).status_code == 404


async def test_drafts_are_there_unasked(http):
    await watch(http)
    text = "abcabcabcabcabcabc"
    answer, path = await ask(http, prompt=text, max_tokens=60)
    story = await get(http, path)
    assert story["drafted_tokens"] > 0
    trees = story["token_trees"]
    assert sum(one["num_drafted"] for one in trees) == story["drafted_tokens"]
    assert sum(one["num_accepted"] for one in trees) == story["accepted_tokens"]
    assert sum(len(one["tokens"]) for one in trees) == answer["usage"]["completion_tokens"]
    assert "token_trees" not in answer["choices"][0]
    asked, asked_path = await ask(http, prompt=text, max_tokens=60, token_trees=True)
    assert (await get(http, asked_path))["token_trees"] == asked["choices"][0]["token_trees"]


async def test_what_was_seen_in_part_says_so(http):
    http.client.is_paused_after = 5
    asking = asyncio.create_task(ask(http, prompt=f"Late. {PROMPT}"))
    async with asyncio.timeout(10):
        while not (running := (await get(http, "/stats/requests?state=running"))["requests"]):
            await asyncio.sleep(0.01)
        while (await get(http, "/stats/requests?state=running"))["requests"][0]["completion_tokens"] < 5:
            await asyncio.sleep(0.01)
    await get(http, f"/stats/requests/{running[0]['id']}")
    http.client.is_paused_after = None
    _, path = await asking
    story = await get(http, path)
    assert 0 < len(story["passes"]) < 20
    assert "a part of its passes" in story["not_observed"]


async def test_without_watching_there_are_no_tokens(http):
    _, path = await ask(http)
    response = await http.get(f"{path}/tokens")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "request_not_observed")
    assert "not observed" in response.json()["error"]["message"]
