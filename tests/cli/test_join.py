"""The options of `moeflow join`; joining itself is tested with the keepers."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from moeflow.cli import lazy
from moeflow.cli.main import main
from moeflow.parallel.tcp.cluster_token import default_token_file, ensure_token
from moeflow.processes.nodes.join_settings import JoinSettings


@pytest.fixture
def joins(monkeypatch):
    """Stand in for joining: with which settings it is done."""
    calls: list[JoinSettings] = []
    monkeypatch.setitem(vars(lazy), "keep_engines", lambda settings, on_news: calls.append(settings))
    monkeypatch.delenv("MOEFLOW_CPU_ISA", raising=False)
    return calls


def run(*args: str):
    return CliRunner().invoke(main, ["join", *args], catch_exceptions=False)


def test_the_head_says_where_the_model_lies_and_the_token_is_in_the_cache_folder(joins, tmp_path):
    token = ensure_token(default_token_file(tmp_path))
    assert run("head.lan:9200", "--cache-dir", str(tmp_path)).exit_code == 0
    assert joins == [JoinSettings(host="head.lan", port=9200, token=token, cache_dir=tmp_path)]


def test_all_of_it_may_be_said(joins, tmp_path, monkeypatch):
    monkeypatch.setenv("MOEFLOW_CPU_ISA", "avx2")
    monkeypatch.chdir(tmp_path)
    token = ensure_token(tmp_path / "token")
    options = ("--cluster-token-file", "token", "--threads", "3", "--cache-dir", str(tmp_path / "cache"))
    assert run("[::1]:9200", "model", *options).exit_code == 0
    assert joins == [
        JoinSettings(
            host="::1",
            port=9200,
            token=token,
            model=str(tmp_path / "model"),
            num_threads=3,
            cpu_isa="avx2",
            cache_dir=tmp_path / "cache",
        )
    ]


def test_what_is_missing_or_wrong_is_one_line(joins, tmp_path):
    result = run("head.lan", "--cache-dir", str(tmp_path))
    assert (result.exit_code, joins) == (2, [])
    assert "Invalid value for HOST:PORT: 'head.lan' is no address: write HOST:PORT, with a port from 1" in result.stderr
    result = run("head.lan:9200", "--cache-dir", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: the cluster's token cannot be read from {tmp_path}/cluster-token (No such")
    assert "copy the head's file there" in result.stderr
