"""Processes are stopped and limited for a while only, and those of others are not touched."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from click.testing import CliRunner

from moeflow.cli.chaos.chaos import chaos
from moeflow.cli.chaos.processes import Undo, find_processes, kill, limit, stop
from moeflow.core.errors import ConfigError
from tests.server.live_server import eventually


@pytest.fixture
def child() -> Iterator[psutil.Process]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield psutil.Process(process.pid)
        process.kill()


def test_a_stopped_process_runs_again_even_if_the_block_is_interrupted(child):
    def interrupted() -> None:
        with Undo() as undo:
            stop(child, undo)
            assert eventually(lambda: child.status() == psutil.STATUS_STOPPED)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert eventually(lambda: child.status() != psutil.STATUS_STOPPED)


def test_a_limit_is_restored(child):
    before = resource.prlimit(child.pid, resource.RLIMIT_FSIZE)
    with Undo() as undo:
        limit(child, resource.RLIMIT_FSIZE, 0, undo)
        assert resource.prlimit(child.pid, resource.RLIMIT_FSIZE) == (0, before[1])
    assert resource.prlimit(child.pid, resource.RLIMIT_FSIZE) == before


def test_a_process_that_has_ended_is_no_error(child):
    with Undo() as undo:
        stop(child, undo)
        limit(child, resource.RLIMIT_FSIZE, 0, undo)
        kill(child)
        child.wait()
    kill(child)


def test_only_a_server_of_moeflow_may_be_disturbed():
    """Its own process, since this one may have children of other tests."""
    code = "import socket; it = socket.create_server(('127.0.0.1', 0)); print(it.getsockname()[1], flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as other:
        with pytest.raises(ConfigError, match="not `moeflow serve`: start a test server"):
            find_processes(int(other.stdout.readline()))
        other.kill()


@pytest.mark.parametrize("url", ["http://example.com:8000", "10.0.0.1:8000"])
def test_another_machine_is_refused(url):
    with pytest.raises(ConfigError, match="is not a loopback address"):
        CliRunner().invoke(chaos, [url, "--yes"], catch_exceptions=False)


@pytest.mark.parametrize("arguments", [(), ("http://127.0.0.1:1", "--cluster")])
def test_one_deployment_must_be_named(arguments):
    assert "either the URL of a test server, or --cluster" in CliRunner().invoke(chaos, arguments).output
