"""A model's sampling defaults hold for what a request leaves open, in every API, and are listed."""

from __future__ import annotations

import msgspec
import pytest

from moeflow.core.token_choice import TokenChoice

pytestmark = pytest.mark.anyio
DEFAULTS = TokenChoice(temperature=0.25, top_k=7, top_p=0.5, min_p=0.125, repetition_penalty=1.5)
GIVEN = {"temperature": 0.0, "top_k": 3, "top_p": 0.75, "min_p": 0.0, "repetition_penalty": 1.0}
MESSAGES = [{"role": "user", "content": "hello"}]
BODIES = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 10},
}


@pytest.fixture(autouse=True)
def _defaults(engine):
    engine.model = msgspec.structs.replace(engine.model, sampling_defaults=DEFAULTS)


async def choice_of(http, engine, path, **fields):
    response = await http.post(path, json=BODIES[path] | fields)
    assert response.status_code == 200, response.text
    return engine.submissions[-1].sampling.choice(TokenChoice())


@pytest.mark.parametrize("path", BODIES)
async def test_open_fields_are_the_models_and_given_ones_the_requests(http, engine, path):
    assert await choice_of(http, engine, path) == DEFAULTS
    assert await choice_of(http, engine, path, **dict.fromkeys(GIVEN)) == DEFAULTS
    assert await choice_of(http, engine, path, **GIVEN) == TokenChoice(**GIVEN)
    for name, value in GIVEN.items():
        expected = TokenChoice(**(DEFAULTS.changes() | {name: value}))
        assert await choice_of(http, engine, path, **{name: value}) == expected


async def test_a_response_shows_the_values_in_use(http):
    answer = (await http.post("/v1/responses", json={"input": "hello", "top_p": 0.75})).json()
    assert (answer["temperature"], answer["top_p"]) == (0.25, 0.75)


async def test_models_list_their_defaults(http, engine):
    (card,) = (await http.get("/v1/models")).json()["data"]
    assert card["default_sampling_params"] == DEFAULTS.changes()
    engine.model = msgspec.structs.replace(engine.model, sampling_defaults=TokenChoice(temperature=0.5))
    assert (await http.get(f"/v1/models/{card['id']}")).json()["default_sampling_params"] == {"temperature": 0.5}
    engine.model = msgspec.structs.replace(engine.model, sampling_defaults=TokenChoice())
    assert (await http.get("/v1/models")).json()["data"][0]["default_sampling_params"] == {}
