from __future__ import annotations

import socket

import pytest

from moeflow.core.errors import ConfigError
from moeflow.server.config import ServerConfig
from moeflow.server.listener import listen, url


def test_any_free_port():
    with listen(ServerConfig(port=0)) as listener:
        port = listener.getsockname()[1]
        assert url(listener) == f"http://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port), timeout=2).close()


def test_a_port_in_use_is_known_at_once():
    with listen(ServerConfig(port=0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}: the port is in use.*--port"):
            listen(ServerConfig(port=port))


def test_a_port_can_be_taken_again_at_once():
    with listen(ServerConfig(port=0)) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = listener.accept()
        accepted.close()
        client.close()
    listen(ServerConfig(port=port)).close()


def test_localhost_is_127_0_0_1():
    with listen(ServerConfig(host="localhost", port=0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_every_network_is_shown_as_this_machine():
    with listen(ServerConfig(host="0.0.0.0", port=0)) as listener:
        assert url(listener).startswith("http://127.0.0.1:")


@pytest.mark.parametrize(("host", "reason"), [("no.such.host.invalid", "unknown"), ("192.0.2.1", "--host")])
def test_a_host_that_is_not_ours(host, reason):
    with pytest.raises(ConfigError, match=reason):
        listen(ServerConfig(host=host, port=0))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"port": -1}, "port"),
        ({"port": 65536}, "port"),
        ({"api_key": " "}, "api_key"),
        ({"api_key": "\udcff"}, "api_key"),
        ({"api_key": "a\n"}, "api_key"),
        ({"max_queue": -1}, "max_queue"),
        ({"max_body_bytes": 10}, "max_body_bytes"),
        ({"shutdown_deadline_s": float("nan")}, "shutdown_deadline_s"),
        ({"shutdown_deadline_s": -1.0}, "shutdown_deadline_s"),
    ],
)
def test_settings_that_make_no_sense(fields, name):
    with pytest.raises(ConfigError, match=name):
        ServerConfig(**fields)


def test_the_key_is_not_shown():
    assert "secret" not in repr(ServerConfig(api_key="secret"))


def test_small_packets_are_sent_at_once():
    with listen(ServerConfig(port=0)) as listener:
        client = socket.create_connection(listener.getsockname(), timeout=2)
        accepted, _ = listener.accept()
        with client, accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
