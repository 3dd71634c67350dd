"""The command: its choice of checks, its forms of results, and its exit code."""

from __future__ import annotations

import json
from types import SimpleNamespace
from xml.etree import ElementTree

import httpx
import pytest
from click.testing import CliRunner

from moeflow.cli.check.check import check
from moeflow.core.errors import ConfigError, EngineError
from tests.cli.check.conftest import KEY
from tests.cli.check.mistakes import set_to, status, when
from tests.cli.check.recorded import Replay


@pytest.fixture
def command(checked, monkeypatch):
    """Runs the command against recorded answers with a mistake."""
    _, replies = checked

    def run(mistake, *arguments):
        def client(**options):
            return httpx.Client(**options, transport=Replay(replies, mistake))

        monkeypatch.setattr("moeflow.cli.check.check.httpx", SimpleNamespace(Client=client, Limits=httpx.Limits))
        done = CliRunner().invoke(check, ("--api-key", KEY, *arguments), standalone_mode=False)
        if done.exception:
            raise done.exception
        return done.return_value, done.output

    return run


def correct(_):
    pass


def test_failures_are_shown_with_their_request(command):
    code, output = command(set_to(99, "usage", "total_tokens"), "http://recorded", "--only", "chat.us*", "--verbose")
    assert code == 1
    assert "FAILED" in output
    assert "total_tokens must be" in output
    assert "curl -sN -X POST http://recorded/v1/chat/completions" in output
    assert 'Authorization: Bearer $MOEFLOW_API_KEY"' in output
    assert KEY not in output.replace("$MOEFLOW_API_KEY", "")


def test_results_as_json_and_junit(command, tmp_path):
    file = tmp_path / "results.xml"
    code, output = command(set_to(99, "usage", "total_tokens"), "--only", "chat", "--json", "--junit", str(file))
    results = [json.loads(line) for line in output.splitlines()]
    suite = ElementTree.parse(file).getroot().find("testsuite")
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert code == 1
    assert failed == [it["check"] for it in results if it["status"] == "FAILED"]
    assert "usage_sums" in failed
    assert len(suite) == int(suite.get("tests")) == len(results) > 10


def test_a_correct_server_gets_exit_code_0(command):
    code, output = command(correct, "--only", "schemas")
    assert code == 0
    assert "3 checks in" in output
    assert "3 ok" in output


def test_an_absent_api_fails_only_where_it_is_required(command):
    without = when(lambda reply: b"max_tokens" in reply.asked and b"messages" not in reply.asked, status(404))
    code, output = command(without, "--only", "messages")
    assert code == 0
    assert "the server has no /v1/messages (404)" in output
    assert command(without, "--only", "messages", "--api", "anthropic")[0] == 1
    assert command(without, "--only", "messages", "--api", "all")[0] == 1


def test_refused_features_are_absent(command):
    code, output = command(when(lambda reply: reply.request().get("n"), status(400)), "--only", "chat.several_choices")
    assert code == 0
    assert "absent" in output
    assert "refused with 400" in output


def test_the_list_of_checks_needs_no_server(command):
    _, output = command(correct, "--list", "--api", "responses")
    assert "responses.stored: A stored response can be read, continued and deleted." in output
    assert "chat." not in output


def test_wrong_input_is_explained(command):
    with pytest.raises(ConfigError, match="--list prints all names"):
        command(correct, "--only", "nothing")
    with pytest.raises(ConfigError, match="give it with --api-key"):
        command(status(401))


def test_a_server_that_does_not_answer():
    with pytest.raises(EngineError, match=r"no server answers at http://127\.0\.0\.1:9"):
        CliRunner().invoke(check, ("http://127.0.0.1:9",), standalone_mode=False, catch_exceptions=False)
