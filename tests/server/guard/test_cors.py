"""Which web pages of other origins may use the API, as browsers ask for it (the Fetch standard's CORS protocol)."""

from __future__ import annotations

import pytest

from moeflow.core.errors import ConfigError
from moeflow.server.config import ServerConfig
from tests.server.conftest import connect

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
APP = "https://app.example.org"
CROSS = {"origin": APP, "sec-fetch-site": "cross-site"}
PREFLIGHT = {
    "origin": APP,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


async def test_an_allowed_page_may_ask_and_read(make_app):
    async with connect(make_app(cors_origins=(APP, "http://localhost:3000"), api_key="k")) as http:
        preflight = await http.options("/v1/chat/completions", headers=PREFLIGHT)
        answer = await http.post("/v1/chat/completions", json=CHAT, headers=CROSS | {"authorization": "Bearer k"})
        refused = await http.post("/v1/chat/completions", json=CHAT, headers=CROSS)
        unknown = await http.get("/v1/none", headers=CROSS | {"authorization": "Bearer k"})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == APP
    assert "POST" in preflight.headers["access-control-allow-methods"]
    allowed = preflight.headers["access-control-allow-headers"].lower()
    assert {"authorization", "content-type", "x-stainless-lang"} <= set(allowed.split(","))
    assert [it.status_code for it in (answer, refused, unknown)] == [200, 401, 404]
    for response in (preflight, answer, refused, unknown):
        assert response.headers["access-control-allow-origin"] == APP
        assert "origin" in response.headers["vary"].lower()
        assert "access-control-allow-credentials" not in response.headers
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "x-moeflow-left-out" in answer.headers["access-control-expose-headers"]


async def test_a_fault_of_ours_can_be_read_too(make_app, monkeypatch):
    app = make_app(cors_origins=(APP,))
    monkeypatch.setattr(app.state.service, "require_model", lambda *args, **fields: 1 / 0)
    async with connect(app) as http:
        response = await http.post("/v1/chat/completions", json=CHAT, headers=CROSS)
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (500, APP)


@pytest.mark.parametrize("origin", ["https://app.example.org.evil.example", "http://app.example.org", "null", ""])
async def test_other_pages_may_not(make_app, origin):
    headers = CROSS | {"origin": origin}
    async with connect(make_app(cors_origins=(APP,))) as http:
        preflight = await http.options("/v1/chat/completions", headers=PREFLIGHT | {"origin": origin})
        answer = await http.post("/v1/chat/completions", json=CHAT, headers=headers)
        read = await http.get("/v1/models", headers=headers)
    assert (preflight.status_code, answer.status_code) == (400, 403)
    for response in (preflight, answer, read):
        assert "access-control-allow-origin" not in response.headers
        assert "origin" in response.headers["vary"].lower()


async def test_two_origins_are_not_one_that_is_allowed(make_app):
    headers = [("origin", APP), ("origin", "http://evil.example"), ("sec-fetch-site", "cross-site")]
    async with connect(make_app(cors_origins=(APP,))) as http:
        assert (await http.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 403


async def test_a_star_is_every_page(make_app):
    async with connect(make_app(cors_origins=("*",))) as http:
        preflight = await http.options("/v1/chat/completions", headers=PREFLIGHT)
        answer = await http.post("/v1/chat/completions", json=CHAT, headers=CROSS)
    assert (preflight.status_code, answer.status_code) == (200, 200)
    assert preflight.headers["access-control-allow-origin"] == answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("origin", ["https://a.example/", "a.example", "null", "https://a.example/path", ""])
def test_what_is_no_origin_is_said_at_once(origin):
    with pytest.raises(ConfigError, match="cors_origin"):
        ServerConfig(cors_origins=(origin,))
