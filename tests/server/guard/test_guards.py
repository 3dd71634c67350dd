"""Who may come in: API key and host names."""

from __future__ import annotations

import pytest

from moeflow.server.guard.hosts import host_name
from tests.server.conftest import all_routes, assets_path, connect

pytestmark = pytest.mark.anyio

KEY = "geheim-ü"
OPEN = {"/health", "/ready"}
REFUSED = {  # of Ollama's API
    *(("POST", f"/api/{verb}") for verb in ("push", "create", "copy", "blobs/{digest}")),
    ("DELETE", "/api/delete"),
}


def api_routes(app) -> list[tuple[str, str]]:
    document = app.openapi()
    return [(method, path) for path, methods in document["paths"].items() for method in methods]


async def test_every_endpoint_but_probes_asks_for_the_key(make_app):
    app = make_app(api_key=KEY)
    routes = api_routes(app)
    assert len(routes) >= 9
    async with connect(app) as http:
        for method, path in routes:
            ids = dict.fromkeys(("name", "file_id", "batch_id", "response_id", "request_id"), "x")
            response = await http.request(method, path.format(**ids))
            assert (response.status_code == 401) == (path not in OPEN), path
            if path not in OPEN:
                assert response.headers["www-authenticate"] == "Bearer"
                error = response.json()["error"]
                if path.startswith("/api/"):
                    assert error.startswith("A valid API key is needed")
                    continue
                is_anthropic = path.startswith("/v1/messages")
                assert error.get("code") == (None if is_anthropic else "invalid_api_key")
                assert error["type"] == "authentication_error"


async def test_nothing_outside_the_document_answers_but_page_and_document(app):
    routes = list(all_routes(app.routes))
    assert len(routes) >= len(api_routes(app))
    hidden = [route for route in routes if not route.include_in_schema]
    assert {(method, route.path) for route in hidden for method in route.methods} == {
        ("HEAD", "/health"),  # as some probes ask
        ("HEAD", "/ready"),
        ("HEAD", "/api/tags"),  # as Ollama answers
        ("HEAD", "/api/version"),
        *REFUSED,
    }


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (f"Bearer {KEY}", 200),
        (f"bearer  {KEY}", 200),
        ("Bearer wrong", 401),
        ("Bearer ", 401),
        ("Bearer", 401),
        (KEY, 401),
        (f"Basic {KEY}", 401),
        (f"Bearer {KEY} x", 401),
        ("\xff\xfe", 401),
    ],
)
async def test_only_the_right_key_opens(make_app, header, status):
    async with connect(make_app(api_key=KEY)) as http:
        response = await http.get("/v1/models", headers={"authorization": header.encode()})
        assert response.status_code == status


async def test_the_page_and_the_document_stay_open(make_app):
    async with connect(make_app(api_key=KEY)) as http:
        script = f"{await assets_path(http)}/app.js"
        for path in ("/", script, "/openapi.json", "/health", "/ready"):
            assert (await http.get(path)).status_code == 200, path


async def test_without_a_key_everybody_may_ask(http):
    assert (await http.get("/v1/models")).status_code == 200


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST", "127.0.0.2"]
)
async def test_loopbacks_own_names_are_answered(http, host):
    assert (await http.get("/health", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "192.168.1.7", "[::2]"]
)
async def test_other_names_are_not(http, host):
    response = await http.get("/health", headers={"host": host})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "host_not_allowed"
    assert "--allowed-host" in response.json()["error"]["message"]


async def test_names_can_be_added(make_app):
    async with connect(make_app(allowed_hosts=("Box.local",))) as http:
        assert (await http.get("/health", headers={"host": "box.LOCAL:80"})).status_code == 200
        assert (await http.get("/health", headers={"host": "other.local"})).status_code == 403


async def test_on_a_network_names_are_checked_only_if_some_are_given(make_app):
    async with connect(make_app(host="0.0.0.0")) as http:
        assert (await http.get("/health", headers={"host": "anything.example"})).status_code == 200
    async with connect(make_app(host="0.0.0.0", allowed_hosts=("a.example",))) as http:
        assert (await http.get("/health", headers={"host": "b.example"})).status_code == 403


@pytest.mark.parametrize(
    ("header", "name"), [("[::1]:80", "::1"), ("a:80", "a"), ("A.", "a"), ("", ""), ("[", ""), ("a:b:c", "a")]
)
def test_host_name(header, name):
    assert host_name(header) == name


async def test_no_other_origin_is_invited(http):
    preflight = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    response = await http.options("/v1/chat/completions", headers=preflight)
    assert response.status_code == 405
    assert not any(name.startswith("access-control") for name in response.headers)
