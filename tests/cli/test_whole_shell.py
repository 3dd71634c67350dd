"""The real command on real models: what a person does, with nothing faked."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.terminal import terminal
from tests.packed import pack_beside
from tests.tiny_mixtral import EOS, write_tiny_mixtral

MOEFLOW = (sys.executable, "-m", "moeflow.cli.main")
CTRL_C, CTRL_D = b"\x03", b"\x04"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    """A model that talks nonsense for up to 100,000 tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    model = write_tiny_mixtral(folder, max_position_embeddings=100_000)
    model.lm_head.weight.data[EOS] = 0.0  # never the likeliest
    model.save_pretrained(folder)
    pack_beside(folder)
    return str(folder)


def moeflow(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*MOEFLOW, *args], input=stdin, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_generate_and_chat_agree_on_what_the_model_says(tiny):
    limits = ("--max-tokens", "5", "--temperature", "0", "--max-model-len", "200", "--cache-dir", tiny)
    generated = moeflow("generate", tiny, "-p", "hello", "--chat", "--json", *limits)
    assert generated.returncode == 0, generated.stderr
    result = json.loads(generated.stdout)["results"][0]
    assert len(result["token_ids"]) == 5
    assert result["finish_reason"] == "length"

    chatted = moeflow("chat", tiny, *limits, stdin="hello\n")
    assert (chatted.returncode, chatted.stdout) == (0, result["text"] + "\n")


@pytest.mark.slow
@pytest.mark.thorough  # tests/cli/doctor compares each finding
def test_doctor_says_that_the_model_fits(tiny):
    findings = json.loads(moeflow("doctor", tiny, "--json").stdout)
    assert {finding["topic"] for finding in findings} >= {"model", "fit", "KV cache", "requests"}


@pytest.mark.slow
def test_a_model_that_is_not_there_is_one_line():
    done = moeflow("generate", "no/such/model", "-p", "x")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: file no/such/model: does not exist.")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.thorough), signal.SIGINT])
def test_a_generation_ends_quietly_and_its_trace_is_written(tiny, tmp_path, number):
    file = tmp_path / "trace.json"
    limits = ("--max-tokens", "90000", "--temperature", "0", "--kv-cache", "64MiB", "--threads", "1")
    options = (*limits, "--cache-dir", tiny, "--trace", str(file))
    with terminal(*MOEFLOW, "generate", tiny, "-p", "hello", *options) as session:
        session.expect("tokens/s")
        if number == signal.SIGINT:
            session.type(CTRL_C)
        else:
            session.process.send_signal(number)
        seen = session.rest()
        assert session.process.wait(60) == 128 + number
    assert "Traceback" not in seen
    assert "error" not in seen
    events = json.loads(file.read_text())["traceEvents"]
    assert "passes" in [event["args"]["name"] for event in events if event["name"] == "thread_name"]


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(tiny):
    limits = ("--max-tokens", "90000", "--temperature", "0", "--kv-cache", "64MiB", "--threads", "1")
    options = (*limits, "--cache-dir", tiny)
    with terminal(*MOEFLOW, "chat", tiny, *options) as session:
        session.expect("> ")
        session.type(b"hello\n")
        session.expect("hello\r\n")
        session.expect("\x1b[?2004l\r")  # keys typed now are not input any more
        session.expect("")  # the answer has begun
        session.type(CTRL_C)
        session.expect("first after")
        session.expect("> ")
        session.type(b"/set max_tokens 3\n")
        session.expect("max_tokens is 3")
        session.expect("> ")
        session.type(b"/reset\n")
        session.expect("forgotten")
        session.expect("> ")
        session.type(b"again\n")
        session.expect("[3 tokens")
        session.expect("> ")
        session.type(CTRL_D)
        assert session.process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.weights
def test_the_built_in_model_knows_the_capital_of_france(builtin_model: Path):
    done = moeflow(
        "generate", str(builtin_model), "-p", "What is the capital of France?", "--chat", "--temperature", "0"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of France is Paris.\n"
