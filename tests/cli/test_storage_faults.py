"""The real command where disks are full or fail, and where it is interrupted or killed: one line, and nothing left."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from moeflow.checkpoint.packed.layout import read_slab_index
from moeflow.checkpoint.packed.reader import verify_packed_weights_file
from moeflow.checkpoint.packed.writer import partial_file
from moeflow.cli.main import main
from moeflow.core.errors import StorageError
from moeflow.kernels.cpu import extension
from tests.checkpoint.packed.slabs import flip_bit
from tests.marks import thorough_unless
from tests.server.live_server import eventually
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not extension.is_available() or sys.platform != "linux", reason="needs the kernels, and /proc"),
]
MOEFLOW = (sys.executable, "-m", "moeflow.cli.main")
# How Python ends, of whatever code, if Ctrl-C fell into an exec() of an import; shells say 130.
BY_SIGINT = -signal.SIGINT


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, hidden_size=128, intermediate_size=512, num_local_experts=32, num_hidden_layers=4)
    return str(folder)


def begin(*args: str | Path, **options) -> subprocess.Popen[str]:
    command = [*MOEFLOW, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit code, and stderr without progress lines, which slow machines get."""
    _, errors = process.communicate(timeout=120)
    lines = errors.splitlines(keepends=True)
    return process.returncode, "".join(line for line in lines if not re.match(r"[A-Z][a-z ]+: \d+%", line))


def refuse_large_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))


@pytest.fixture
def packs(model: str, little_text: None) -> Callable[[Path], Result]:
    """Runs the command that packs the model to its end, in this process, which has imported everything."""
    return lambda file: CliRunner().invoke(main, ["pack", model, "--out", str(file)])


FEW = ("--max-model-len", "128", "--max-num-seqs", "2", "--threads", "1")


@pytest.fixture(scope="module")
def streamed(model: str) -> tuple[str, ...]:
    """A generation with memory for some experts; the limit comes from the error for a too low one."""
    generate = ("generate", model, "-p", "hello", "--max-tokens", "4", "--temperature", "0", *FEW)
    _, refusal = ended(begin(*generate, "--memory", "1MiB"))
    need_mib = float(refusal.split("with the process that is ")[1].split(" MiB")[0])
    return (*generate, "--memory", f"{need_mib + 30:.0f}MiB")


def test_a_full_disk_is_said_in_a_line(model, streamed, tmp_path):
    file = tmp_path / "slabs"
    code, errors = ended(begin("pack", model, "--out", file, preexec_fn=refuse_large_files))
    assert (code, errors.count("\n")) == (2, 1)
    assert errors.startswith(f"error: not enough disk space for {file}: need ")
    assert not file.exists()
    code, errors = ended(begin(*streamed, "--packed-weights", file, preexec_fn=refuse_large_files))  # on first use
    assert (code, errors.count("\n")) == (2, 1)
    assert errors.startswith(f"error: not enough disk space for {file}: need ")
    assert not list(tmp_path.iterdir())


def test_packing_that_was_cut_short_is_done_again(model, packs, tmp_path):
    file = tmp_path / "slabs"
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = begin("pack", model, "--out", file)
        try:
            assert eventually(lambda: partial_file(file).exists() or file.exists(), 120)
        finally:
            process.send_signal(number)
        code, errors = ended(process)
        assert code in (0, -signal.SIGKILL if number == signal.SIGKILL else 128 + number, BY_SIGINT)
        assert errors.strip() == ""
        assert {path.name for path in tmp_path.iterdir()} <= {"slabs", partial_file(file).name}
        file.unlink(missing_ok=True)  # of one that was done before it could be cut short
    assert packs(file).exit_code == 0
    assert list(tmp_path.iterdir()) == [file]
    verify_packed_weights_file(read_slab_index(file), lambda *_: None)


@pytest.mark.parametrize("delay_s", thorough_unless(lambda it: it == 1.0, (0.3, 1.0, 2.0)))
def test_ctrl_c_while_loading_is_quiet(model, tmp_path, delay_s):
    process = begin("generate", model, "-p", "hello", "--max-tokens", "100", "--temperature", "0", cwd=tmp_path)
    time.sleep(delay_s)
    process.send_signal(signal.SIGINT)
    code, errors = ended(process)
    assert code in (0, 130, BY_SIGINT)
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())


def test_damage_ends_a_generation_with_a_line_and_packing_again_mends_it(packs, streamed, tmp_path):
    file = tmp_path / "slabs"
    assert packs(file).exit_code == 0
    spec = read_slab_index(file).spec
    for number in range(32):  # the first layer
        flip_bit(file, spec.offset(number) + 7)
    command = (*streamed, "--packed-weights", file)
    code, errors = ended(begin(*command))
    assert code == 1
    assert "Traceback" not in errors
    assert str(file) in errors
    assert "cannot be read" in errors.splitlines()[-1]
    assert errors.splitlines()[-1].startswith("error: the pass failed: StorageError: file slabs, layer 0, expert ")
    with pytest.raises(StorageError):
        verify_packed_weights_file(read_slab_index(file), lambda *_: None)
    assert packs(file).exit_code == 0
    assert ended(begin(*command)) == (0, "")
    os.truncate(file, spec.file_bytes // 2)
    code, errors = ended(begin(*command))
    assert (code, errors.count("\n")) == (2, 1)
    assert f"file {file}: is {spec.file_bytes // 2} bytes long instead of {spec.file_bytes}" in errors
