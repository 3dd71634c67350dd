"""Which requests count as sent by our own page, or by no page at all, and which are turned away."""

from __future__ import annotations

import pytest

from moeflow.server.jobs.data_folder import Jobs
from tests.server.conftest import connect

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


async def ask(app, headers: dict[str, str] | list[tuple[str, str]]) -> int:
    async with connect(app) as http:
        response = await http.post("/v1/chat/completions", json=CHAT, headers=headers)
    if response.status_code == 403:
        assert response.json()["error"]["code"] == "origin_not_allowed"
    return response.status_code


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),  # OpenAI's clients and curl
        ({"sec-fetch-site": "same-origin", "origin": "http://localhost:8000"}, 200),
        ({"sec-fetch-site": "same-origin", "origin": "https://ai.example.com"}, 200),  # a proxy has changed Host
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site", "origin": "http://localhost:3000"}, 403),  # another server on this machine
        ({"sec-fetch-site": "cross-site", "origin": "http://localhost:8000"}, 403),  # after a redirect, say
        ({"sec-fetch-site": "nonsense"}, 403),
        ({"sec-fetch-site": ""}, 403),
        ({"origin": "http://localhost:8000"}, 200),  # a browser that does not say the site
        ({"origin": "http://LOCALHOST:8000"}, 200),
        ({"origin": "https://localhost:8000"}, 200),  # a proxy that speaks TLS and keeps Host
        ({"origin": "http://localhost:3000"}, 403),
        ({"origin": "http://localhost"}, 403),
        ({"origin": "http://127.0.0.1:8000"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://evil.example:8000"}, 403),
        ({"origin": "http://localhost:8000.evil.example"}, 403),
        ({"origin": "http://localhost:8000@evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"origin": "localhost:8000"}, 403),
        ({"origin": "http://localhost:8000/"}, 403),
        ({"origin": "http://[::1"}, 403),
        ({"origin": "http://localhost:99999"}, 403),
        ({"origin": "file://"}, 403),
        ({"origin": "chrome-extension://abcdef"}, 403),
        ([("origin", "http://localhost:8000"), ("origin", "http://evil.example")], 403),
    ],
)
async def test_who_may_change_something(app, headers, status):
    given = [*(headers.items() if isinstance(headers, dict) else headers), ("host", "localhost:8000")]
    assert await ask(app, given) == status


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        ("https://box.local", "box.local", 200),  # default ports are left out on both sides
        ("http://box.local", "box.local:80", 200),
        ("https://box.local:443", "box.local", 200),
        ("https://box.local", "127.0.0.1:8000", 200),  # a proxy has changed Host: the allowed name counts
        ("http://box.local:8000", "127.0.0.1:8000", 200),
        ("http://box.local:3000", "127.0.0.1:8000", 403),  # another server on that machine
        ("https://other.local", "127.0.0.1:8000", 403),
        ("https://evil.box.local", "127.0.0.1:8000", 403),
    ],
)
async def test_behind_a_proxy(make_app, origin, host, status):
    assert await ask(make_app(allowed_hosts=("Box.local",)), {"origin": origin, "host": host}) == status


async def test_on_a_network_the_page_may_use_its_own_server_and_no_other_page(make_app):
    app = make_app(host="0.0.0.0")
    host = {"host": "192.168.1.7:8000"}
    assert await ask(app, {**host, "origin": "http://192.168.1.7:8000"}) == 200
    assert await ask(app, {**host, "origin": "http://192.168.1.8:8000"}) == 403


async def test_what_changes_nothing_may_be_read_from_anywhere(http):
    foreign = {"origin": "http://evil.example", "sec-fetch-site": "cross-site"}
    for method in ("GET", "HEAD"):
        assert (await http.request(method, "/health", headers=foreign)).status_code == 200
    assert (await http.options("/v1/chat/completions", headers=foreign)).status_code == 405


async def test_no_unsafe_request_of_a_foreign_page_is_let_in(make_app, tmp_path):
    app = make_app()
    jobs = app.state.jobs = Jobs(tmp_path, app.state.service)
    stored = [
        ("DELETE", "/v1/files/x"),
        ("POST", "/v1/batches/x/cancel"),
        ("POST", "/v1/files"),
        ("POST", "/v1/batches"),
    ]
    async with connect(app) as http:
        for method, path in [*stored, ("POST", "/tokenize"), ("POST", "/v1/nothing"), ("BREW", "/")]:
            response = await http.request(method, path, headers={"origin": "http://evil.example"})
            assert response.status_code == 403, path
        form = {"data": {"purpose": "batch"}, "files": {"file": b"x"}}
        assert (await http.post("/v1/files", **form, headers={"origin": "null"})).status_code == 403
        assert jobs.files.all() == []
        assert (await http.post("/v1/files", **form)).status_code == 200
    assert b'reason="origin_not_allowed"' in app.state.service.metrics.exposition()
    await jobs.close()
