"""A model's name in place of a path, through the command: with and without a downloaded model."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from moeflow.cli.list import ago
from moeflow.cli.main import main
from tests.checkpoint.hub.hub_server import TOKEN, hub_of_this_process
from tests.checkpoint.tiny_models import random_weights, write_gguf
from tests.tiny_mixtral import write_tiny_mixtral

NAME = "tiny/Mixtral"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_mixtral(folder)
    return folder


@pytest.fixture
def hub(monkeypatch, tmp_path, folder, little_text):
    monkeypatch.setenv("MOEFLOW_CACHE", str(tmp_path / "cache"))
    with hub_of_this_process(monkeypatch, tmp_path / "hub") as hub:
        hub.add_folder(NAME, folder)
        hub.add_folder("tiny/Gated", folder, gated=True)
        yield hub


def moeflow(*args: str) -> Result:
    return CliRunner().invoke(main, list(args))


@pytest.mark.slow
def test_a_name_that_is_not_here_is_pulled_only_if_asked(hub, tmp_path):
    refused = moeflow("generate", NAME, "-p", "abc")
    assert (refused.exit_code, hub.requests) == (2, [])
    assert f"`moeflow pull {NAME}` downloads it" in refused.stderr
    asks = ("-p", "abc", "--max-tokens", "2", "--temperature", "0", "--json", "--pull")
    done = moeflow("generate", NAME, *asks)
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["model"] == NAME
    asked = len(hub.requests)
    packed = Path(json.loads(moeflow("pack", NAME, "--json").stdout)["path"])
    assert packed.name.startswith("tiny--Mixtral-")
    again = moeflow("generate", NAME, *asks)
    assert json.loads(again.stdout)["results"] == json.loads(done.stdout)["results"]
    assert len(hub.requests) == asked, "what is here is not asked for"

    unsure = moeflow("rm", NAME)
    assert (unsure.exit_code, "add --yes" in unsure.stderr, packed.exists()) == (2, True, True)
    removed = moeflow("rm", NAME, "--yes", "--json")
    assert json.loads(removed.stdout)["deleted_bytes"] > 200_000
    assert "No models in" in moeflow("list").stderr
    assert [*(tmp_path / "cache" / "experts").iterdir(), *(tmp_path / "cache" / "routing").iterdir()] == []


def test_a_gated_model_needs_a_token(hub, monkeypatch):
    refused = moeflow("pull", "tiny/Gated")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "is gated" in refused.stderr
    assert refused.stderr.count("\n") == 1
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert moeflow("pull", "tiny/Gated").exit_code == 0


def test_what_is_no_name_is_said(hub):
    refused = moeflow("pull", "Mixtral")
    assert (refused.exit_code, hub.requests) == (2, [])
    assert "OWNER/NAME:TAG" in refused.stderr
    assert "is not downloaded" in moeflow("rm", "tiny/None", "--yes").stderr


@pytest.mark.slow
def test_doctor_and_plan_look_at_a_model_before_it_is_pulled(hub, tmp_path):
    findings = json.loads(moeflow("doctor", NAME, "--json").stdout)
    assert {"model", "fit", "speed"} <= {finding["topic"] for finding in findings}
    planned = moeflow("plan", NAME, "--machine", "l4", "--json")
    assert planned.exit_code == 0, planned.stderr
    assert "Only the headers of" in planned.stderr
    assert json.loads(planned.stdout)["config"]["model_path"] == NAME
    assert "was not found" in moeflow("plan", NAME, "--validate").stderr
    assert all(it.range for it in hub.sent())
    missing = json.loads(moeflow("doctor", "tiny/Nothing", "--json").stdout)
    assert any("Check the spelling" in finding["found"] for finding in missing)


def test_a_plan_from_the_headers_of_a_gguf_file_names_the_model(hub, tmp_path):
    write_gguf(tmp_path / "m-Q8_0.gguf", "mixtral", random_weights("mixtral"))
    hub.add("o/m-GGUF", {"m-Q8_0.gguf": (tmp_path / "m-Q8_0.gguf").read_bytes()})
    lengths = ("--prompt-len", "8", "--gen-len", "8")
    planned = moeflow("plan", "o/m-GGUF", "--machine", "t4", "--json", *lengths)
    assert planned.exit_code == 0, planned.stderr
    assert json.loads(planned.stdout)["config"]["model_path"] == "o/m-GGUF"


@pytest.mark.slow
def test_a_gguf_model_in_parts_is_looked_at_pulled_run_and_removed(hub, tmp_path):
    how = {"split_max_tensors": 6}
    write_gguf(tmp_path / "m-Q4_K_M.gguf", "mixtral", random_weights("mixtral"), **how)
    whole = str(write_gguf(tmp_path / "whole.gguf", "mixtral", random_weights("mixtral")))
    parts = sorted(tmp_path.glob("m-*.gguf"))
    name, size = "o/m-GGUF:Q4_K_M", sum(part.stat().st_size for part in parts)
    hub.add("o/m-GGUF", {f"Q4_K_M/{part.name}": part.read_bytes() for part in parts} | {"m-Q8_0.gguf": b"another"})
    lengths = ("--prompt-len", "8", "--gen-len", "8")
    planned = moeflow("plan", name, "--machine", "t4", "--json", *lengths)
    assert planned.exit_code == 0, planned.stderr
    assert json.loads(planned.stdout)["config"]["model_path"] == name
    found = {it["topic"]: it["found"] for it in json.loads(moeflow("doctor", name, "--json").stdout)}
    assert "mixtral" in found["model"]
    assert "was not found" in moeflow("generate", name, "-p", "a").stderr
    assert moeflow("pull", name).exit_code == 0
    (row,) = json.loads(moeflow("list", "--json").stdout)
    assert (row["name"], row["size_bytes"], row["is_supported"]) == (name, size, True)
    assert Path(row["path"]).name == parts[0].name
    packed = Path(json.loads(moeflow("pack", name, "--json").stdout)["path"])
    assert packed.name.startswith("o--m-GGUF-Q4_K_M-")
    answers = {}
    for model in (whole, name, row["path"], str(parts[0]), str(parts[2]), str(Path(row["path"]).parent)):
        done = moeflow("generate", model, "-p", "ab z", "--max-tokens", "12", "--json", "--temperature", "0")
        assert done.exit_code == 0, done.stderr
        answer = json.loads(done.stdout)
        answers[model] = answer["results"]
        assert answer["model"] == {whole: "whole", str(parts[0]): "m-Q4_K_M", str(parts[2]): "m-Q4_K_M"}.get(
            model, name
        )
    assert all(answer == answers[whole] for answer in answers.values())
    removed = moeflow("rm", name, "--yes", "--json")
    assert json.loads(removed.stdout)["deleted_bytes"] > size
    assert not packed.exists()
    assert "No models in" in moeflow("list").stderr


def test_a_model_that_cannot_be_run_is_listed_as_such(hub):
    hub.add("o/Odd", {"config.json": b'{"model_type": "odd"}', "model.safetensors": b"none"})
    assert moeflow("pull", "o/Odd").exit_code == 0
    (row,) = json.loads(moeflow("list", "--json").stdout)
    assert (row["name"], row["is_supported"], row["family"]) == ("o/Odd", False, None)
    assert "o/Odd" in row["problem"] or "safetensors" in row["problem"]
    assert "not supported" in moeflow("list").stdout


def test_how_long_ago_it_was(monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1e9)
    said = [ago(1e9 - seconds) for seconds in (-5, 59, 300, 7200, 3 * 86400)]
    assert said == ["just now", "just now", "5 min ago", "2 h 0 min ago", "3 days ago"]
