"""The command as people run it: killed at any moment, interrupted, repeated, and misused."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from codecs import BOM_UTF8
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from moeflow.cli.main import main
from tests.packed import pack_beside
from tests.server.jobs.requests import chat_line, completion_line, read_lines, write_lines
from tests.server.live_server import eventually
from tests.tiny_mixtral import write_tiny_mixtral

MOEFLOW = (sys.executable, "-m", "moeflow.cli.main", "batch")
NUM_LINES = 40


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, max_position_embeddings=4096)
    pack_beside(folder)
    return folder


class Command:
    """One job's command, to be run as often as needed."""

    def __init__(self, model: Path, folder: Path, answer_len: int = 200, num_answers: int = 1) -> None:
        """Make an input whose first answers are short, and the next ones not long; the others are several each."""
        lengths = [20 if i < 8 else 300 if i < 16 else answer_len + i for i in range(NUM_LINES - 2)]
        lines = [
            chat_line(
                str(i), f"Hello {i}", max_tokens=length, temperature=0, ignore_eos=True, n=1 if i < 16 else num_answers
            )
            for i, length in enumerate(lengths)
        ]
        self.source = write_lines(
            folder / "in.jsonl", *lines, completion_line("c", temperature=0), chat_line("bad", n=0)
        )
        self.output, self.errors = folder / "out.jsonl", folder / "out.errors.jsonl"
        options = ("--cache-dir", str(model), "--threads", "1", "--kv-cache", "16MiB", "--max-num-seqs", "8")
        self.arguments = (*MOEFLOW, str(self.source), str(model), "-o", str(self.output), *options)

    def finish(self, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self.arguments, *more], capture_output=True, text=True, timeout=240, check=False)

    def finish_here(self) -> Result:
        """In this process, which has imported everything."""
        return CliRunner().invoke(main, self.arguments[len(MOEFLOW) - 1 :], catch_exceptions=False)

    def num_lines(self) -> int:
        return sum(file.read_bytes().count(b"\n") for file in (self.output, self.errors) if file.exists())

    def stop(self, number: int, *, after: int) -> tuple[int, str]:
        """Send a signal after so many more lines; return the exit code and the output."""
        wanted = self.num_lines() + after
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": hear_ctrl_c}
        with subprocess.Popen(self.arguments, text=True, start_new_session=True, **pipes) as process:
            try:
                assert eventually(lambda: self.num_lines() >= wanted or process.poll() is not None, 120)
                time.sleep(0.01 * after)
                process.send_signal(number)
                _, said = process.communicate(timeout=60)
                return process.returncode, said
            finally:
                process.kill()

    def check_results(self) -> None:
        ids = [line["custom_id"] for line in (*read_lines(self.output), *read_lines(self.errors))]
        assert sorted(ids) == sorted([*map(str, range(NUM_LINES - 2)), "c", "bad"])
        assert [line["custom_id"] for line in read_lines(self.errors)] == ["bad"]


@pytest.mark.slow
def test_killed_again_and_again_no_line_is_lost_or_doubled(tiny, tmp_path):
    command = Command(tiny, tmp_path)
    for after in (1, 4):
        command.stop(signal.SIGKILL, after=after)
    done = command.finish("--json")
    assert done.returncode == 1, done.stderr  # one line is wrong
    command.check_results()
    summary = json.loads(done.stdout)
    again = command.finish_here()
    assert (again.exit_code, f"{NUM_LINES - 1} of {NUM_LINES} requests answered" in again.output) == (1, True)
    command.check_results()
    assert summary["requests"]["total"] == NUM_LINES
    assert 5 <= summary["requests"]["answered_before"] < NUM_LINES
    assert "To try these again, delete it" in done.stderr

    whole = tmp_path / "whole"
    whole.mkdir()
    other = Command(tiny, whole)
    assert other.finish_here().exit_code == 1
    assert texts(other.output) == texts(command.output)  # the same bits, however often it was killed


def hear_ctrl_c() -> None:
    """Shells let background processes ignore it, tests included."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def texts(output: Path) -> dict[str, object]:
    return {line["custom_id"]: line["response"]["body"]["choices"] for line in read_lines(output)}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_interrupted_it_says_how_to_go_on(tiny, tmp_path, number):
    command = Command(tiny, tmp_path, answer_len=3000, num_answers=8)  # a minute of work
    code, said = command.stop(number, after=2)
    assert code == 130, said
    assert f"of {NUM_LINES} requests are done. The same command goes on from here:\n" in said
    assert "Traceback" not in said
    assert int(said.split("Stopped: ")[1].split()[0]) == command.num_lines() >= 2


@pytest.mark.slow
def test_a_full_disk_ends_it_and_it_goes_on_later(tiny, tmp_path):
    """The limit on a file's size plays the disk."""
    command = Command(tiny, tmp_path, answer_len=50)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))

    pipes = {"capture_output": True, "text": True, "timeout": 240, "check": False}
    done = subprocess.run(command.arguments, preexec_fn=limit, **pipes)
    assert done.returncode == 1, done.stderr
    assert "The same command goes on from here:" in done.stderr
    assert "error: [Errno 27] File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert command.num_lines() >= 1
    assert command.output.read_bytes().endswith(b"\n")
    assert command.finish_here().exit_code == 1  # one line is wrong
    command.check_results()


def run(*args: str):
    return CliRunner().invoke(main, ["batch", *args], catch_exceptions=False)


@pytest.mark.slow  # imports the server
def test_a_wrong_input_is_told_before_anything_is_made(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", chat_line("a"), b"oops", chat_line("a"))
    result = run(str(source), "no/model", "-o", str(tmp_path / "out.jsonl"))
    assert result.exit_code == 2
    assert "line 2: the line is not valid JSON" in result.stderr
    assert "line 3: custom_id 'a' is that of line 1, too" in result.stderr
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_an_input_may_begin_with_a_byte_order_mark(tiny, tmp_path):
    """Editors on Windows write one. A server accepts the same file."""
    line = chat_line("a", "Hello", max_tokens=2, temperature=0)
    source = write_lines(tmp_path / "in.jsonl", BOM_UTF8 + line)
    arguments = ["batch", str(source), str(tiny), "-o", str(tmp_path / "out.jsonl"), "--cache-dir", str(tiny)]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert [answer["custom_id"] for answer in read_lines(tmp_path / "out.jsonl")] == ["a"]


def test_an_output_that_is_the_input_is_refused(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", chat_line("a"))
    result = run(str(source), "-o", str(source))
    assert (result.exit_code, "three different files" in result.stderr) == (2, True)


@pytest.mark.parametrize("make", [Path.symlink_to, Path.hardlink_to])
def test_an_output_that_is_a_link_to_the_input_is_refused(tmp_path, make):
    source = write_lines(tmp_path / "in.jsonl", chat_line("a"))
    link = tmp_path / "link.jsonl"
    make(link, source)
    result = run(str(source), "-o", str(link))
    assert (result.exit_code, "three different files" in result.stderr) == (2, True)


def test_a_link_to_a_folder_that_is_not_there_is_no_output(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", chat_line("a"))
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "nowhere" / "x")
    result = run(str(source), "-o", str(tmp_path / "link.jsonl"))
    assert (result.exit_code, "nowhere' does not exist; make it" in result.stderr) == (2, True)


@pytest.mark.slow  # imports the server
def test_what_cannot_be_read_twice_is_neither_input_nor_output(tmp_path, tiny):
    """A pipe would be read once and then be empty; /dev/full gives zeros without end."""
    source = write_lines(tmp_path / "in.jsonl", chat_line("a"))
    result = run("/dev/full", str(tiny), "-o", str(tmp_path / "out.jsonl"))
    assert (result.exit_code, "write it to a file first" in result.stderr) == (2, True)
    result = run(str(source), str(tiny), "-o", "/dev/full")
    assert (result.exit_code, "/dev/full: it is no regular file" in result.stderr) == (2, True)


@pytest.mark.slow  # imports the server
def test_many_wrong_lines_are_not_all_told(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", *[b"oops"] * 30)
    result = run(str(source), "-o", str(tmp_path / "out.jsonl"))
    assert "line 20: " in result.stderr
    assert "line 21: " not in result.stderr
    assert "(the first 20; there may be more)" in result.stderr
