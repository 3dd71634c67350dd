"""A server that is killed in the middle of writing prompts and recurrent states to disk, and its successor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress

import httpx
import pytest

from moeflow.kernels.cpu import extension
from moeflow.kv.disk.extent import read_extent
from tests.packed import pack_beside
from tests.tiny_granite_hybrid import write_tiny_granite_hybrid
from tests.tiny_lfm2 import write_tiny_lfm2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,  # tests/engine/prompt_cache/test_processes.py kills writers of blocks at any moment
    pytest.mark.skipif(not extension.is_available(), reason="only kernels give the same bits every time"),
]

MAIN = "import sys; from moeflow.cli.main import main; sys.exit(main())"
ASKED = {"prompt": [7 * i % 250 + 3 for i in range(300)], "max_tokens": 12, "temperature": 0, "logprobs": 3}
# Runs at the start of the engine's process: its N-th write ends in the middle, and so do both processes.
KILLER = """
import os, signal, sys
if any("moeflow.processes.main" in argument for argument in sys.orig_argv):
    from moeflow.kv.disk.extent import ExtentWriter
    left, init = int(os.environ["WRITES_LEFT"]), ExtentWriter.__init__

    class Torn:
        def __init__(self, stream):
            self.stream = stream

        def write(self, data):
            global left
            left -= 1
            if left:
                return self.stream.write(data)
            self.stream.write(bytes(data)[: len(data) // 2])
            self.stream.flush()
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    def begin(writer, stream, **what):
        init(writer, Torn(stream), **what)

    ExtentWriter.__init__ = begin
"""


@pytest.fixture(scope="module", params=[write_tiny_lfm2, write_tiny_granite_hybrid])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    request.param(folder)
    pack_beside(folder, folder / "cache")
    return folder


@contextmanager
def serving(model, *options, **environment):
    """Yield a server's address and process; end it in order if it still runs."""
    command = [sys.executable, "-c", MAIN, "serve", str(model), "--port", "0", "--threads", "1", *map(str, options)]
    command += ["--cache-dir", str(model / "cache"), "--kv-cache", "8MiB"]
    server = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        line = server.stdout.readline()
        assert "http://" in line
        yield line.split()[-1].rstrip("/"), server
        if server.poll() is None:
            server.terminate()
            server.wait(30)
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def ask(url) -> dict:
    answer = httpx.post(f"{url}/v1/completions", json=ASKED, timeout=60)
    answer.raise_for_status()
    return answer.json()


def test_no_torn_file_is_used_and_answers_keep_their_bits(model, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(KILLER)
    folder = tmp_path / "prompts"
    with serving(model) as (url, _):
        expected = ask(url)["choices"]
    num_whole = []
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    for number in (1, 3):  # blocks; states, when blocks and their description have been written
        with serving(model, "--prompt-cache", folder, PYTHONPATH=path, WRITES_LEFT=str(number)) as (url, server):
            with suppress(httpx.HTTPError):
                ask(url)  # the files may be written after the answer
            assert server.wait(20) == -signal.SIGKILL
        (torn,) = folder.glob(".*.tmp")
        assert torn.stat().st_size > 0
        assert read_extent(torn) is None
        num_whole.append(len([*folder.glob("*.moekv")]))
    assert num_whole == [0, 1]
    for least_cached in (0, 256):
        with serving(model, "--prompt-cache", folder) as (url, _):
            answer = ask(url)
            assert answer["choices"] == expected
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= least_cached
    assert not [*folder.glob(".*.tmp")]
    assert all(read_extent(file) is not None for file in folder.glob("*.moekv"))
