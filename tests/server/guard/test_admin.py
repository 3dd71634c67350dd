"""Who may change models and engines, or read about the machine: every endpoint against every kind of client."""

from __future__ import annotations

import pytest

from tests.server.conftest import connect

pytestmark = pytest.mark.anyio

APP = "https://app.example.org"
KEY = {"authorization": "Bearer k"}
PAGE = {"host": "localhost:8000", "origin": "http://localhost:8000", "sec-fetch-site": "same-origin"}
ALLOWED = {"host": "localhost:8000", "origin": APP, "sec-fetch-site": "cross-site"}
CHANGES = [
    ("POST", "/models/load", {"model": "o/none"}),
    ("POST", "/models/unload", {"model": "o/none"}),
    ("POST", "/models/pull", {"model": "not a name"}),
    ("POST", "/models/pull/cancel", {}),
    ("POST", "/api/pull", {"model": "not a name"}),
    ("POST", "/replicas", {"num_replicas": 2}),
]
READS = [("GET", path, None) for path in ("/models/local", "/models/pull", "/stats/log")]


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setattr("moeflow.server.downloads.hub_cache", lambda: tmp_path)


async def ask(app, method, path, body, headers) -> tuple[int, str]:
    """Return the status, and the error's code, which Ollama's errors lack."""
    async with connect(app) as http:
        response = await http.request(method, path, json=body, headers=headers)
    error = response.json().get("error", "")
    return response.status_code, error if isinstance(error, str) else error["code"]


@pytest.mark.parametrize("config", [{}, {"host": "0.0.0.0"}, {"cors_origins": ("*",)}])
async def test_without_keys_nothing_is_changed(make_app, config):
    app = make_app(**config)
    for change in CHANGES:
        for headers in (PAGE, {"host": "localhost"}, KEY):
            status, code = await ask(app, *change, headers)
            assert status == 403
            assert code == "api_key_needed" or "MOEFLOW_API_KEY=SECRET" in code


@pytest.mark.parametrize("cors_origins", [(), (APP,), ("*",)])
async def test_changes_need_a_key_and_our_own_page(make_app, cors_origins):
    app = make_app(api_key="k", cors_origins=cors_origins)
    for change in CHANGES:
        for headers in (ALLOWED | KEY, {"origin": APP} | KEY, {"sec-fetch-site": "cross-site"} | KEY):
            status, code = await ask(app, *change, headers)
            assert (status, code == "origin_not_allowed" or "web page of another origin" in code) == (403, True)
        assert (await ask(app, *change, PAGE))[0] == 401
        assert (await ask(app, *change, PAGE | {"x-api-key": "wrong"}))[0] == 401
        for headers in (PAGE | KEY, KEY):
            assert (await ask(app, *change, headers))[0] in (200, 400, 409)  # it has come through


@pytest.mark.parametrize(
    ("config", "is_allowed"),
    [
        ({}, True),
        ({"host": "0.0.0.0"}, False),
        ({"allowed_hosts": ("localhost",)}, False),
        ({"root_path": "/llm"}, False),
        ({"forwarded_allow_ips": "127.0.0.1"}, False),
    ],
)
async def test_without_keys_reading_is_for_this_machine(make_app, config, is_allowed):
    app = make_app(**config)
    for read in READS:
        for headers in (PAGE, {"host": "localhost"}):
            assert await ask(app, *read, headers) == ((200, "") if is_allowed else (403, "api_key_needed"))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_with_keys_reading_needs_one(make_app, host):
    app = make_app(api_key="k", host=host, cors_origins=(APP,))
    for read in READS:
        assert (await ask(app, *read, PAGE))[0] == 401
        assert (await ask(app, *read, PAGE | KEY))[0] == 200
        assert await ask(app, *read, ALLOWED | KEY) == (403, "origin_not_allowed")


async def test_pages_elsewhere_read_nothing(make_app):
    app = make_app(cors_origins=("*",))
    for read in READS:
        assert await ask(app, *read, ALLOWED) == (403, "origin_not_allowed")
        assert await ask(app, *read, {"host": "evil.example"}) == (403, "host_not_allowed")


@pytest.mark.parametrize("config", [{}, {"api_key": "k"}])
async def test_no_spelling_of_a_path_gets_around_the_key(make_app, config):
    async with connect(make_app(**config)) as http:
        for path in ("/models/load/", "//models/load", "/models/load%0a", "/x/../models/load", "/MODELS/load"):
            response = await http.post(path, json={"model": "x"}, follow_redirects=True)
            assert response.status_code in (401, 403, 404, 405), path
