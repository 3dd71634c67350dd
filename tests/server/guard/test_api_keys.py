"""Several keys: which ones open, their limits per minute, their metrics and log lines."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import signal
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.errors import ConfigError
from moeflow.server.api.completions import completions
from moeflow.server.config import ServerConfig
from moeflow.server.guard import allowance
from moeflow.server.guard.allowance import Allowance
from moeflow.server.guard.api_keys import ApiKeys
from moeflow.server.guard.key_file import read_key_file
from moeflow.server.http_server import HttpServer
from moeflow.server.launch import reloading, serve
from moeflow.server.logs import JsonLines
from moeflow.server.request_log import RequestRecord, client_of
from tests.server.conftest import connect

COMPLETION = {"prompt": "abc", "max_tokens": 5}
ALICE, BOB = "alice-secret", "bob-secret"
SHA256 = hashlib.sha256(BOB.encode()).hexdigest()
FILE = f"""
[alice]
key = "{ALICE}"
requests-per-minute = 2

[bob]
sha256 = "{SHA256}"
tokens-per-minute = 10
"""


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(allowance.Allowance.__init__, "__defaults__", (clock,))
    return clock


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    return path


def bearer(key):
    return {"authorization": f"Bearer {key}"}


@pytest.mark.anyio
async def test_each_key_opens_and_no_other(make_app, key_file):
    async with connect(make_app(api_keys_file=key_file, api_key="single")) as http:
        for headers in (bearer(ALICE), bearer(BOB), {"x-api-key": BOB}, bearer("single")):
            assert (await http.get("/v1/models", headers=headers)).status_code == 200
        for headers in ({}, bearer("carol"), bearer(SHA256), bearer("alice"), bearer("")):
            assert (await http.get("/v1/models", headers=headers)).status_code == 401


@pytest.mark.anyio
async def test_no_spelling_of_a_path_opens_an_endpoint_without_a_key(make_app, key_file):
    app = make_app(api_keys_file=key_file)
    async with connect(app) as http:
        paths = (await http.get("/openapi.json")).json()["paths"]
        guarded = {path: methods for path, methods in paths.items() if path not in ("/health", "/ready")}
        assert {"/metrics", "/stats", "/classify", "/v1/models"} <= guarded.keys()
        for path, methods in guarded.items():
            for spelling in (path, f"{path}%0A", f"{path}%0a", f"{path}/", f"/{path}", f"/.{path}"):
                for method in (*methods, "HEAD", "OPTIONS"):
                    answer = await http.request(method, f"http://localhost{spelling}")
                    assert answer.status_code in (307, 401, 404), (method, spelling)


@pytest.mark.anyio
@pytest.mark.parametrize("root_path", ["/m", "/metric", "/v"])
async def test_a_prefix_that_begins_as_an_endpoint_opens_none(make_app, key_file, root_path):
    """uvicorn puts the prefix before any target, so that the target `etrics` becomes the path `/metrics`."""
    transport = httpx.ASGITransport(make_app(api_keys_file=key_file, root_path=root_path), root_path=root_path)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        for path in ("/metrics", "/v1/models"):
            assert (await http.get(path)).status_code == 401
            assert (await http.get(root_path + path)).status_code == 401
            assert (await http.get(root_path + path, headers=bearer(ALICE))).status_code == 200


@pytest.mark.anyio
@pytest.mark.parametrize("key", ["voil\u00e0", "\u00c5", "\u20ac\u00a0x"])  # two end with a space of Latin-1
async def test_a_key_in_utf_8(make_app, tmp_path, key):
    (tmp_path / "keys.toml").write_text(f'[alice]\nkey = "{key}"', encoding="utf-8")
    async with connect(make_app(api_keys_file=tmp_path / "keys.toml")) as http:
        for headers in ([(b"authorization", b"Bearer  " + key.encode())], [(b"x-api-key", key.encode() + b" ")]):
            assert (await http.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.anyio
async def test_requests_beyond_the_limit_are_told_when_to_come_back(make_app, key_file, clock):
    async with connect(make_app(api_keys_file=key_file)) as http:

        async def ask(key=ALICE):
            return await http.post("/v1/completions", json=COMPLETION, headers=bearer(key))

        assert [(await ask()).status_code for _ in range(2)] == [200, 200]
        refused = await ask()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "30")
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert (await http.get("/v1/models", headers=bearer(ALICE))).status_code == 200
        assert (await ask(BOB)).status_code == 200  # with limits of its own
        clock.now_s += 29.0
        assert (await ask()).status_code == 429
        clock.now_s += 1.0
        assert [(await ask()).status_code for _ in range(2)] == [200, 429]
        text = (await http.get("/metrics", headers=bearer(ALICE))).text
    assert 'moeflow_key_requests_limited_total{key="alice"} 3.0' in text
    assert 'moeflow_requests_rejected_total{reason="rate_limit_exceeded"} 3.0' in text


@pytest.mark.anyio
async def test_tokens_beyond_the_limit_delay_the_next_request(make_app, key_file, clock):
    async with connect(make_app(api_keys_file=key_file)) as http:
        asked = [await http.post("/v1/completions", json=COMPLETION, headers=bearer(BOB)) for _ in range(3)]
        assert [it.status_code for it in asked] == [200, 200, 429]  # 8 tokens each, of 10 a minute
        refused = asked[2]
        assert refused.headers["retry-after"] == "42"  # until 1 is there: 7 at 10 a minute
        text = (await http.get("/metrics", headers=bearer(BOB))).text
    assert 'moeflow_key_tokens_total{key="bob",kind="prompt"} 6.0' in text
    assert 'moeflow_key_tokens_total{key="bob",kind="completion"} 10.0' in text
    assert 'moeflow_key_tokens_total{key="alice",kind="prompt"} 0.0' in text


def test_tokens_of_requests_under_way_count(key_file, clock):
    account = ApiKeys(ServerConfig(api_keys_file=key_file)).find(BOB.encode())
    first, second = RequestRecord("1"), RequestRecord("2")
    assert account.begin(first) == account.begin(second) == 0.0
    first.work = SimpleNamespace(num_prompt_tokens=4, num_completion_tokens=6)
    assert account.begin(RequestRecord("3")) == pytest.approx(6.0)
    account.end(first)
    account.end(first)
    assert account.begin(RequestRecord("3")) == pytest.approx(6.0)


@given(st.integers(1, 50), st.lists(st.floats(0.0, 10.0), max_size=200))
def test_any_window_of_a_minute_has_at_most_two_minutes_amounts(per_minute, pauses_s):
    clock = Clock()
    allowed = Allowance(per_minute, clock)
    taken_s = []
    for pause_s in pauses_s:
        clock.now_s += pause_s
        if allowed.wait_s() == 0.0:
            allowed.take(1)
            taken_s.append(clock.now_s)
        else:
            at_s = clock.now_s + allowed.wait_s()
            assert len(taken_s) >= per_minute
            assert at_s - clock.now_s <= 60.0 / per_minute + 1e-6
    for begin_s in taken_s:
        assert sum(begin_s <= at_s < begin_s + 60.0 for at_s in taken_s) <= 2 * per_minute + 1


@pytest.mark.anyio
async def test_the_log_names_the_key_and_shows_none(make_app, key_file, caplog):
    with caplog.at_level(logging.DEBUG, "moeflow"):
        async with connect(make_app(api_keys_file=key_file)) as http:
            await http.get("/v1/models", headers=bearer(ALICE))
            await http.get("/v1/models", headers=bearer("wrong-secret"))
    records = [record for record in caplog.records if record.name == "moeflow.server.request_log"]
    assert [record.fields.get("key") for record in records] == ["alice", None]
    assert "secret" not in "".join(map(JsonLines().format, records))


@pytest.mark.anyio
async def test_the_file_is_read_again_and_stays_in_use_if_it_is_wrong(make_app, key_file):
    app = make_app(api_keys_file=key_file)
    async with connect(app) as http:
        key_file.write_text('[carol]\nkey = "carol-secret"\n')
        app.state.service.reload_keys()
        assert (await http.get("/v1/models", headers=bearer(ALICE))).status_code == 401
        assert (await http.get("/v1/models", headers=bearer("carol-secret"))).status_code == 200
        key_file.write_text("[")
        with pytest.raises(ConfigError):
            app.state.service.reload_keys()
        assert (await http.get("/v1/models", headers=bearer("carol-secret"))).status_code == 200


def test_sighup_reads_the_file_again(make_app, key_file, caplog):
    app = make_app(api_keys_file=key_file)
    keys = app.state.service.keys

    async def hang_up(until):
        with reloading(HttpServer(app)):
            os.kill(os.getpid(), signal.SIGHUP)
            while not until():
                await asyncio.sleep(0.001)

    with caplog.at_level(logging.INFO, "moeflow"):
        key_file.write_text('[carol]\nkey = "carol-secret"\n')
        asyncio.run(hang_up(lambda: keys.names == ["carol"]))
        key_file.write_text("[carol]")
        asyncio.run(hang_up(lambda: "stay in use" in caplog.text))
    assert keys.names == ["carol"]
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


def test_without_files_to_read_sighup_ends_the_server_as_usual(app):
    async def look():
        with reloading(HttpServer(app)):
            return signal.getsignal(signal.SIGHUP)

    assert asyncio.run(look()) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[", "not valid TOML"),
        ("", "no key"),
        ("alice = 'secret'", "alice must be a table"),
        ("[alice]", "either key or sha256"),
        (f"[alice]\nkey='secret'\nsha256='{SHA256}'", "either key or sha256"),
        ("[alice]\nkey=' '", "not empty"),
        ("[alice]\nkey=7", "not empty"),
        ("[alice]\nsha256='secret'", "64 hex digits"),
        (f"[alice]\nsha256='{hashlib.sha256().hexdigest()}'", "that of an empty key"),
        (f"[alice]\nkey='secret'\nrequests-per-minute=1{'0' * 400}", "from 1 to 1000000000000"),
        (f"[alice]\nkey='secret'\nrequests-per-minute=1{'0' * 5000}", "not valid TOML"),
        (f"alice = {'[' * 5000}", "not valid TOML: it nests too deeply"),
        ("[alice]\nkey='secret'\nrequests-per-minute=0", "requests-per-minute of \\[alice\\]"),
        ("[alice]\nkey='secret'\ntokens-per-minute=true", "tokens-per-minute of \\[alice\\]"),
        ("[alice]\nkey='secret'\nrate=7", "unknown field 'rate'; known are key"),
        ("['a b']\nkey='secret'", "name must be"),
        ("[api-key]\nkey='secret'", "name must be"),
        ("[alice]\nkey='secret'\n[bob]\nkey='secret'", "\\[alice\\] and \\[bob\\] have the same key"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_without_its_keys(tmp_path, text, reason):
    (tmp_path / "keys.toml").write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        read_key_file(tmp_path / "keys.toml")
    assert "keys.toml" in str(caught.value)
    assert not re.search("secret", str(caught.value))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key_file(tmp_path / "none.toml")


@pytest.mark.anyio
async def test_a_client_is_its_key_or_else_its_address(make_app, key_file, engine, monkeypatch):
    """Shares of a client are those of a key, also where all keys come through one proxy."""
    clients = []
    monkeypatch.setattr(completions, "client_of", lambda request: clients.append(client_of(request)) or clients[-1])
    for config, keys in (({"api_keys_file": key_file}, (ALICE, BOB)), ({}, (ALICE,))):
        async with connect(make_app(**config)) as http:
            for key in keys:
                headers = {"authorization": f"Bearer {key}"}
                assert (await http.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == 200
    assert clients == ["key alice", "key bob", "127.0.0.1"]


def test_a_hangup_while_the_model_is_planned_does_not_end_the_server(key_file):
    hangups = []

    def plan():
        hangups.append(signal.getsignal(signal.SIGHUP))
        if hangups != [signal.SIG_DFL]:
            os.kill(os.getpid(), signal.SIGHUP)
        raise ConfigError("planned")

    with pytest.raises(ConfigError, match="planned"):
        serve(plan, ServerConfig(port=0, api_keys_file=key_file))
    assert hangups != [signal.SIG_DFL]
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
