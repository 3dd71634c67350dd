"""Settings that were written to do harm: each ends in one line, and none in a traceback."""

import json
from contextlib import suppress

import pytest
from click.testing import CliRunner

from moeflow.bench import records
from moeflow.cli import lazy
from moeflow.cli.main import main
from moeflow.core.errors import ConfigError
from moeflow.core.plan import plan_from_json, plan_to_json
from moeflow.planner.apply_plan import settings_beside
from moeflow.planner.hardware.machine_files import load_machine
from moeflow.workload.offline import read_questions
from studies.speculation.prompts import read_prompts
from tests.planner.example_plans import PLAN

DEEP = b"[" * 5000 + b"]" * 5000
DOTTED = ".".join("a" * 5000).encode()
JSON = {
    "5,000 levels": DEEP,
    "5,000 levels in an object": b'{"format_version": ' + DEEP + b"}",
    "many digits": b'{"format_version": ' + b"9" * 5000 + b"}",
    "a list": b"[]",
    "null": b"null",
    "a text": b'"x"',
    "no UTF-8": b'{"\xff": 1}',
    "NaN": b'{"name": NaN}',
    "the same key twice": b'{"name": 1, "name": 2}',
    "nothing": b"",
}


def run(*arguments):
    done = CliRunner().invoke(main, [*map(str, arguments)])
    assert done.exit_code == 2, (done.output, done.exception)
    assert isinstance(done.exception, SystemExit)
    assert "Traceback" not in done.output
    assert len(done.output) < 2000
    return done.output


@pytest.mark.parametrize(
    "text",
    [
        b"max-model-len = " + DEEP,
        b"max-model-len = " + b"9" * 5000,
        b"model = {" + DOTTED + b" = 1}",
        DOTTED + b" = 1",
        b"model = " + b"[" * 90 + b"]" * 90,
        b"x" * 100_000 + b" = 1",
        b"[serve]\n" + b"x" * 100_000 + b" = 1",
        b"[" + b"x" * 100_000 + b"]\n",
        b"memory = '" + b"x" * 100_000 + b"'",
        b"threads = " + b"9" * 4000,
        b"threads = 100000",
        b"threads = nan",
        b"\xff = 1",
        b"model = '\xff'",
        b"model = 2026-13-45",
        b"model = '\\u0000'",
        b"models = [" + b"'x'," * 100_000 + b"]",
    ],
)
def test_a_config(tmp_path, text):
    (tmp_path / "config.toml").write_bytes(text)
    assert run("serve", "--config", tmp_path / "config.toml", "--explain").startswith(("error: ", "Usage", "warning"))


@pytest.mark.parametrize("path", ["/dev/zero", "/proc/self/mem", "."])
@pytest.mark.parametrize("option", ["--config", "--plan"])
def test_a_file_that_is_none(path, option):
    run("plan", option, path)


@pytest.mark.parametrize("text", JSON.values(), ids=JSON)
def test_a_plan(tmp_path, text):
    file = tmp_path / "plan.json"
    file.write_bytes(text)
    assert str(file) in run("serve", "--plan", file)


@pytest.mark.parametrize("text", JSON.values(), ids=JSON)
@pytest.mark.parametrize("read", [lambda file: load_machine(str(file)), lambda file: read_prompts(file, "nothing")])
def test_machines_and_prompts(tmp_path, text, read):
    (tmp_path / "file.json").write_bytes(text)
    with pytest.raises(ConfigError) as error:
        read(tmp_path / "file.json")
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("name", [name for name, text in JSON.items() if text])
@pytest.mark.parametrize("read", [lambda file: records.read([file]), read_questions])
def test_lines(tmp_path, name, read):
    (tmp_path / "file.jsonl").write_bytes(JSON[name])
    with pytest.raises(ConfigError):
        read(tmp_path / "file.jsonl")


@pytest.mark.parametrize("text", [DEEP, b"9" * 5000, b"\xff", b"{"])
def test_prompts_of_a_plan(tmp_path, text):
    (tmp_path / "prompts.jsonl").write_bytes(b'{"prompt": "x"}\n' + text)
    done = CliRunner().invoke(main, ["plan", "--prompts", str(tmp_path / "prompts.jsonl")])
    assert (done.exit_code, isinstance(done.exception, SystemExit)) == (2, True)
    assert "line 2: is no JSON" in done.output


@pytest.mark.parametrize("options", [["--prompt-file", "prompt.txt"], ["-p", "\udcff"], []])
def test_a_prompt_that_is_not_utf8(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompt.txt").write_bytes(b"\xff")
    monkeypatch.setitem(vars(lazy), "LLM", None)
    done = CliRunner().invoke(main, ["generate", "model", *options], input=b"\xff")
    assert (done.exit_code, isinstance(done.exception, SystemExit)) == (2, True)
    assert "a text is not UTF-8" in done.output


def leaves(value, place=()):
    """Yield the places of all values in a document."""
    yield place
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*place, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from leaves(inner, (*place, number))


def with_value(document, place, value):
    if not place:
        return value
    changed = json.loads(json.dumps(document))
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return changed


@pytest.mark.parametrize("value", [None, True, -1, 10**30, 10**400, 1e300, "", "\0", "x" * 10_000, [], {}, [[[]]]])
def test_any_value_in_a_plan_is_read_or_refused(value):
    document = json.loads(plan_to_json(PLAN))
    for place in leaves(document):
        text = json.dumps(with_value(document, place, value))
        with suppress(ConfigError):
            settings_beside(plan_from_json(text, "plan.json"), {"model": PLAN.config.model_path})
