"""The options of `moeflow lend`; lending itself is tested with the engine's remote experts."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from moeflow.cli import lazy
from moeflow.cli.main import main
from moeflow.core.units import GIB
from moeflow.engine.lending import LendSettings
from moeflow.parallel.tcp.cluster_token import default_token_file, ensure_token


@pytest.fixture
def lends(monkeypatch):
    """Stand in for lending: with which settings it is done."""
    calls: list[LendSettings] = []
    monkeypatch.setitem(vars(lazy), "lend", lambda settings, on_news: calls.append(settings))
    monkeypatch.delenv("MOEFLOW_CPU_ISA", raising=False)
    return calls


def run(*args: str):
    return CliRunner().invoke(main, ["lend", *args], catch_exceptions=False)


def test_a_port_alone_listens_here_and_a_token_is_made(lends, tmp_path):
    assert run("--listen", "9300", "--memory", "2GiB", "--cache-dir", str(tmp_path)).exit_code == 0
    token = ensure_token(default_token_file(tmp_path))
    assert lends == [LendSettings(host="127.0.0.1", port=9300, token=token, memory_bytes=2 * GIB)]


def test_all_of_it_may_be_said(lends, tmp_path, monkeypatch):
    monkeypatch.setenv("MOEFLOW_CPU_ISA", "avx2")
    token = ensure_token(tmp_path / "token")
    options = ("--cluster-token-file", str(tmp_path / "token"), "--threads", "3")
    assert run("--listen", "b.lan:9300", "--memory", "1GiB", *options).exit_code == 0
    settings = LendSettings(host="b.lan", port=9300, token=token, memory_bytes=GIB, num_threads=3, cpu_isa="avx2")
    assert lends == [settings]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--listen", "b.lan", "--memory", "1GiB"), "Invalid value for --listen: 'b.lan' is no address"),
        (("--listen", "9300", "--memory", "8"), "did you mean 8GiB?"),
        (("--memory", "1GiB"), "Missing option '--listen'"),
        (("--listen", "9300"), "Missing option '--memory'"),
    ],
)
def test_what_is_missing_or_wrong_is_one_line(lends, arguments, complaint):
    result = run(*arguments)
    assert (result.exit_code, lends) == (2, [])
    assert complaint in result.stderr
