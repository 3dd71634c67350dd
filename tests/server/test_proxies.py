"""Behind a proxy that removes a prefix: paths, guards, addresses of clients; and real proxies with streams."""

from __future__ import annotations

import logging
import re
import ssl

import httpx
import openai
import pytest

from moeflow.core.errors import ConfigError
from moeflow.server.config import ServerConfig
from moeflow.server.http_server import HttpServer
from moeflow.server.tls import tls_context
from tests.server.live_server import eventually, serve_in_thread
from tests.server.proxies import CADDY, NGINX, TLS, behind

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def log(caplog):
    with caplog.at_level(logging.DEBUG, "moeflow"):
        yield lambda: [it.fields for it in caplog.records if it.name == "moeflow.server.request_log"]


def test_a_prefix_changes_no_path_of_the_api(make_app, log):
    with serve_in_thread(make_app(root_path="/llm", api_key="k")) as url, httpx.Client(base_url=url) as http:
        key = {"authorization": "Bearer k"}
        document = http.get("/").text
        assert document.startswith("<!doctype html>")
        (entry,) = re.findall(r'<script type="module" src="([^"]+)"', document)
        assert http.get(f"/{entry}").status_code == 200
        assert http.get("/health").status_code == 200
        for path in ("/v1/models", "/stats", "/metrics", "/tokenize"):
            assert http.get(path).status_code == 401, path
        assert http.get("/v1/models", headers=key).status_code == 200
        assert http.post("/v1/messages", json={}, headers=key).json()["type"] == "error"
        assert "GET /v1/none" in http.get("/v1/none", headers=key).json()["error"]["message"]
        assert http.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]
        text = http.get("/metrics", headers=key).text
    assert 'moeflow_http_requests_total{endpoint="/v1/models",method="GET",status="200"} 1.0' in text
    assert {line["path"] for line in log()} >= {"/", "/health", "/v1/models", "/v1/messages", "/v1/none"}


@pytest.mark.parametrize(
    ("trusted", "forwarded", "client"),
    [
        (None, "203.0.113.7", "127.0.0.1"),
        ("127.0.0.1", "203.0.113.7", "203.0.113.7"),
        ("127.0.0.0/8, 203.0.113.0/24", "192.0.2.1, 203.0.113.7", "192.0.2.1"),
        ("127.0.0.1", "192.0.2.1, 203.0.113.7", "203.0.113.7"),  # the client made up the first one
        ("10.0.0.1", "203.0.113.7", "127.0.0.1"),
        ("*", "203.0.113.7", "203.0.113.7"),
    ],
)
def test_a_clients_address_comes_from_proxies_that_are_trusted(make_app, log, trusted, forwarded, client):
    with serve_in_thread(make_app(forwarded_allow_ips=trusted)) as url:
        httpx.get(f"{url}/v1/models", headers={"x-forwarded-for": forwarded})
    assert [line["client"] for line in log()] == [client]


@pytest.mark.parametrize("path", ["llm", "/llm/", "/", "/a//b", "/a b"])
def test_what_is_no_prefix_is_said_at_once(path):
    with pytest.raises(ConfigError, match="root_path"):
        ServerConfig(root_path=path)


@pytest.mark.parametrize("addresses", ["proxy.example", "10.0.0.1/8", "127.0.0.1;10.0.0.1"])
def test_what_is_no_address_is_said_at_once(addresses):
    with pytest.raises(ConfigError, match="forwarded_allow_ips"):
        ServerConfig(forwarded_allow_ips=addresses)


def trusting(name):
    return ssl.create_default_context(cafile=TLS / f"{name}.pem")


def test_tls_and_a_certificate_that_is_renewed(make_app, tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def install(name):
        cert.write_bytes((TLS / f"{name}.pem").read_bytes())
        key.write_bytes((TLS / f"{name}.key").read_bytes())

    install("first")
    servers = []
    app = make_app(tls_cert=cert, tls_key=key)
    with serve_in_thread(app, on_start=servers.append) as plain:
        url = plain.replace("http://", "https://")
        assert httpx.get(f"{url}/health", verify=trusting("first")).status_code == 200
        with httpx.stream(
            "POST", f"{url}/v1/completions", json={"prompt": "a", "stream": True}, verify=trusting("first")
        ) as it:
            assert list(it.iter_lines())[-2] == "data: [DONE]"
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", verify=trusting("second"))
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{plain}/health")
        install("second")
        servers[0].reload()
        assert httpx.get(f"{url}/health", verify=trusting("second")).status_code == 200
        for unusable in ("no certificate", (TLS / "first.pem").read_text()):  # the second does not match the key
            cert.write_text(unusable)
            with pytest.raises(ConfigError):
                servers[0].reload()
            assert httpx.get(f"{url}/health", verify=trusting("second")).status_code == 200


def test_a_reload_takes_all_files_or_none(make_app, tmp_path):
    keys, cert = tmp_path / "keys.toml", tmp_path / "cert.pem"
    keys.write_text("[alice]\nkey = 'a'")
    cert.write_bytes((TLS / "first.pem").read_bytes())
    app = make_app(api_keys_file=keys, tls_cert=cert, tls_key=TLS / "first.key")
    server = HttpServer(app)
    keys.write_text("[bob]\nkey = 'b'")
    cert.write_text("no certificate")
    with pytest.raises(ConfigError):
        server.reload()
    assert app.state.service.keys.names == ["alice"]


@pytest.mark.parametrize(
    ("cert", "key"),
    [
        ("none.pem", "first.key"),
        ("first.pem", "second.key"),
        ("first.key", "first.key"),
        ("first.pem", "encrypted.key"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_said_before_anything_begins(make_app, cert, key):
    with pytest.raises(ConfigError, match="TLS cannot use the certificate"):
        tls_context(ServerConfig(tls_cert=TLS / cert, tls_key=TLS / key))


@pytest.mark.parametrize("given", [{"tls_cert": TLS / "first.pem"}, {"tls_key": TLS / "first.key"}])
def test_one_file_of_two_is_not_enough(given):
    with pytest.raises(ConfigError, match="both tls_cert and tls_key"):
        ServerConfig(**given)


@pytest.mark.slow
@pytest.mark.parametrize(
    "proxy",
    [
        pytest.param("nginx", marks=pytest.mark.skipif(NGINX is None, reason="needs nginx")),
        pytest.param("caddy", marks=pytest.mark.skipif(CADDY is None, reason="needs Caddy")),
    ],
)
def test_streams_pass_a_real_proxy_token_by_token(make_app, engine, log, tmp_path, proxy):
    app = make_app(root_path="/llm", forwarded_allow_ips="127.0.0.1", allowed_hosts=("models.example.org",))
    engine.pause_after = 3
    with serve_in_thread(app) as url, behind(proxy, int(url.rpartition(":")[2]), tmp_path) as outside:
        http = httpx.Client(verify=trusting("first"), timeout=20)
        assert http.get(f"{outside}/").text.startswith("<!doctype html>")
        moved = http.get(outside, follow_redirects=True)
        assert (moved.status_code, str(moved.url)) == (200, f"{outside}/")
        with openai.OpenAI(base_url=f"{outside}/v1", api_key="none", http_client=http) as client:
            chunks = client.chat.completions.create(model="fake-model", **CHAT, stream=True, max_tokens=6)
            seen = [next(chunks) for _ in range(3)]  # while the engine waits for us
            assert len(engine.live) == 1
            engine.pause_after = None
            seen += list(chunks)
        assert seen[-1].choices[0].finish_reason == "length"
    assert eventually(lambda: not engine.live)
    assert {line["client"] for line in log()} == {"127.0.0.1"}
