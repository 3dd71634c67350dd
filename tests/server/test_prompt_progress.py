"""Progress of a prompt and speeds, as llama.cpp reports them on request."""

from __future__ import annotations

from itertools import pairwise

import openai
import pytest

from tests.server.events import read_events
from tests.server.fake_client import NAME, REPLY
from tests.server.live_server import serve_in_thread

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
BODIES = {CHAT: HELLO, COMPLETIONS: {"prompt": "Hello, world", "max_tokens": 100}}


async def stream(http, path: str, **more) -> list[dict]:
    response = await http.post(path, json=BODIES[path] | {"stream": True} | more)
    assert response.status_code == 200, response.text
    return read_events(response.text)


def without_times(chunks: list[dict]) -> list[dict]:
    """Chunks without what differs between two answers."""
    return [{key: value for key, value in chunk.items() if key not in ("id", "created")} for chunk in chunks]


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_tells_how_far_the_prompt_is_before_its_first_token(http, engine, path):
    engine.num_cached_tokens = 3
    chunks = await stream(http, path, return_progress=True)
    total = len(engine.submissions[0].prompt_token_ids)
    computed = [*range(7, total, 4), total]
    told = [chunk.pop("prompt_progress", None) for chunk in chunks]
    assert told[: len(computed)] == [
        {"total": total, "cache": 3, "processed": so_far, "time_ms": 2500 * number}
        for number, so_far in enumerate(computed, start=1)
    ]
    assert not any(told[len(computed) :])
    plain = without_times(await stream(http, path))
    if path == CHAT:
        assert [chunk["choices"][0]["delta"] for chunk in chunks[1 : len(computed)]] == [{}] * (len(computed) - 1)
        assert without_times([chunks[0], *chunks[len(computed) :]]) == plain
    else:
        assert {chunk["choices"][0]["text"] for chunk in chunks[: len(computed)]} == {""}
        assert without_times(chunks[len(computed) :]) == plain


@pytest.mark.parametrize("path", BODIES)
async def test_nothing_is_reported_that_nobody_asked_for(http, engine, path):
    for more in ({}, {"stream": True}, {"stream": False, "return_progress": True}):
        text = (await http.post(path, json=BODIES[path] | more)).text
        assert "progress" not in text
        assert "timings" not in text
        assert engine.submissions[-1].sampling.prompt_progress is False


async def test_an_echo_with_log_probabilities_is_whole(http):
    asked = {"echo": True, "logprobs": 1}
    plain = without_times(await stream(http, COMPLETIONS, **asked))
    chunks = [chunk for chunk in await stream(http, COMPLETIONS, return_progress=True, **asked)]
    assert without_times([chunk for chunk in chunks if "prompt_progress" not in chunk]) == plain


async def test_each_choice_has_its_progress(http):
    chunks = await stream(http, COMPLETIONS, return_progress=True, n=2, prompt=["Hello", "Hello, world"])
    told: dict[int, list[dict]] = {}
    for chunk in chunks:
        if "prompt_progress" in chunk:
            told.setdefault(chunk["choices"][0]["index"], []).append(chunk["prompt_progress"])
    assert {choice: progress[-1]["total"] for choice, progress in told.items()} == {0: 5, 1: 5, 2: 12, 3: 12}


def test_the_official_clients_helper_takes_it(app):
    with serve_in_thread(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        extra = {"return_progress": True, "timings_per_token": True}
        with client.chat.completions.stream(model=NAME, **HELLO, n=2, extra_body=extra) as events:
            answer = events.get_final_completion()
    assert [(choice.message.role, choice.message.content) for choice in answer.choices] == [("assistant", REPLY)] * 2


def check_timings(timings: dict, prompt: int, predicted: int) -> None:
    """Hold the fields of timings against each other."""
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (3, prompt - 3, predicted)
    for name in ("prompt", "predicted"):
        num, ms = timings[f"{name}_n"], timings[f"{name}_ms"]
        assert timings[f"{name}_per_token_ms"] * num == pytest.approx(ms, rel=0.01, abs=0.001 * num)
        assert timings[f"{name}_per_second"] * ms == pytest.approx(1000 * num if ms else 0, rel=0.01)


@pytest.mark.parametrize("path", BODIES)
async def test_timings_count_tokens_and_divide_them_by_times(http, engine, path):
    engine.num_cached_tokens = 3
    answer = (await http.post(path, json=BODIES[path] | {"timings_per_token": True})).json()
    counts = (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"])
    check_timings(answer["timings"], *counts)
    chunks = await stream(http, path, timings_per_token=True, stream_options={"include_usage": True})
    timings = [chunk["timings"] for chunk in chunks]
    check_timings(timings[-1], *counts)
    assert timings[-1]["predicted_ms"] > 0
    assert all(before["predicted_n"] <= after["predicted_n"] for before, after in pairwise(timings))
    assert all(before["predicted_ms"] <= after["predicted_ms"] for before, after in pairwise(timings))
