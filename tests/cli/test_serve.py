import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from moeflow.cli import lazy
from moeflow.cli.main import main
from moeflow.core.errors import ConfigError
from moeflow.planner.settings import Settings
from moeflow.server.config import ServerConfig

EVERY_OPTION = """
    --host 0.0.0.0 --port 9 --api-key k --allowed-host a --allowed-host b --max-queue 5 --max-body 1MiB
    --shutdown-deadline 2.5 --data-dir my/jobs --max-file 1GiB --file-quota 2GiB
    --max-engine-restarts 7 --engine-timeout 45 --log-level debug --log-format json --log-prompts
    --model-name m --max-num-batched-tokens 64 --no-prefix-caching --max-num-seqs 4
    --dtype bfloat16 --kv-dtype int8 --device cpu --threads 3 --replicas 2 --max-model-len 100 --kv-cache 1GiB
"""


@pytest.fixture
def served(monkeypatch):
    """Stand in for the server: what it was started with."""
    calls: list[tuple[Settings, ServerConfig]] = []

    def serve(plan: Callable[[], Settings], config: ServerConfig) -> int:
        calls.append((plan(), config))
        return 0

    monkeypatch.setitem(vars(lazy), "serve", serve)
    monkeypatch.setitem(vars(lazy), "plan_for_start", lambda settings, usage, on_step: settings)
    monkeypatch.delenv("MOEFLOW_API_KEY", raising=False)
    return calls


def run(*args: str):
    return CliRunner().invoke(main, ["serve", "./my/model", *args], catch_exceptions=False)


def test_without_options_the_defaults_are_those_of_the_floors_below(served, tmp_path):
    assert run("--cache-dir", str(tmp_path)).exit_code == 0
    assert served == [
        (Settings(model="./my/model", cache_dir=tmp_path, is_served=True), ServerConfig(data_dir=tmp_path / "jobs"))
    ]


def test_every_wish_arrives(served, tmp_path):
    result = run(*EVERY_OPTION.split(), "--cache-dir", str(tmp_path))
    assert result.exit_code == 0
    settings = Settings(
        model="./my/model",
        model_name="m",
        dtype="bfloat16",
        kv_dtype="int8",
        device="cpu",
        num_threads=3,
        num_replicas=2,
        max_model_len=100,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_cache_bytes=1024**3,
        prefix_caching=False,
        cache_dir=tmp_path,
        is_served=True,
    )
    config = ServerConfig(
        host="0.0.0.0",
        port=9,
        api_key="k",
        allowed_hosts=("a", "b"),
        max_queue=5,
        max_body_bytes=1024**2,
        data_dir=Path("my/jobs"),
        max_file_bytes=1024**3,
        file_quota_bytes=2 * 1024**3,
        shutdown_deadline_s=2.5,
        log_level="debug",
        log_format="json",
        log_prompts=True,
        max_engine_restarts=7,
        engine_timeout_s=45.0,
    )
    assert served == [(settings, config)]


def test_the_key_may_come_from_the_environment(served, monkeypatch):
    monkeypatch.setenv("MOEFLOW_API_KEY", "secret")
    assert run().exit_code == 0
    assert served[0][1].api_key == "secret"


def test_the_servers_exit_code_is_the_shells(served, monkeypatch):
    monkeypatch.setitem(vars(lazy), "serve", lambda prepare, config: 3)
    assert run().exit_code == 3


@pytest.fixture
def unmade(monkeypatch):
    """Refuse to look for a model."""

    def prepare(overrides: dict[str, object], **always: object) -> Settings:
        raise ConfigError("looked for a model")

    monkeypatch.setattr("moeflow.cli.local_model.prepare", prepare)


def test_a_wrong_wish_is_told_before_a_model_is_looked_for(served, unmade):
    result = run("--port", "99999")
    assert (result.exit_code, result.stderr) == (2, "error: port must be from 0 to 65535, not 99999\n")


@pytest.mark.slow  # imports the server
def test_a_taken_port_is_told_before_a_model_is_looked_for(unmade):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("--port", str(port))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: cannot listen on 127.0.0.1 port {port}: the port is in use")
