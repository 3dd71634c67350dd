"""--plan FILE through the real shell: made by `moeflow plan --json`, carried out by other verbs."""

from __future__ import annotations

import dataclasses
import json

import pytest
from click.testing import CliRunner

from moeflow.cli.main import main
from moeflow.cli.plan.plan_option import read_plan, settings_of
from moeflow.core.errors import ConfigError
from moeflow.core.plan import GOALS, plan_to_json
from moeflow.kernels.cpu import extension
from moeflow.planner.hardware.hardware_json import machine_to_json
from tests.planner.example_plans import ENGINE_CONFIG, PLAN
from tests.planner.examples import machine
from tests.tiny_mixtral import write_tiny_mixtral


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(plan_to_json(PLAN))
    return file


def test_a_plan_is_read_and_what_the_user_said_is_told(file, capsys):
    settings = settings_of({"model": None, "max_num_seqs": 2, "plan_file": file, "kv_dtype": "int8", "num_threads": 1})
    assert (settings.model, settings.max_num_seqs, settings.quantize) == (PLAN.config.model_path, 2, "int8")
    told = capsys.readouterr().err
    assert "note: --max-num-seqs 2 changes the plan" in told
    assert "note: --kv-dtype int8 changes the plan" in told
    assert "warning: the plan was made for this machine, not for this one with --threads 1" in told


def test_settings_that_fall_back_are_told_as_the_command_line_has_them(file, capsys):
    planned = {"prefix_caching": False, "memory_bytes": 1 << 30, "num_replicas": 2}
    file.write_text(plan_to_json(dataclasses.replace(PLAN, settings=planned)))
    overrides = {"model": None, "plan_file": file, "prefix_caching": True, "device": "cuda"}
    settings = settings_of(overrides)
    assert (settings.prefix_caching, settings.memory_bytes) == (True, None)
    told = capsys.readouterr().err
    for text in ("--prefix-caching", "--device cuda", "no --memory", "no --replicas"):
        assert f"note: {text} changes the plan\n" in told
    settings_of({**overrides, "device": None, "prefix_caching": False})
    assert "changes the plan" not in capsys.readouterr().err


def test_files_that_are_no_plan_say_what_to_do(file, tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_plan(tmp_path / "none.json")
    whole = file.read_text()
    file.write_text(whole[: whole.index("tiny") + 2])
    with pytest.raises(ConfigError, match=r"cannot be read: Unterminated string"):
        read_plan(file)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty: make it anew"):
        read_plan(file)
    file.write_text(whole)
    later = json.loads(file.read_text()) | {"format_version": 2}
    file.write_text(json.dumps(later))
    with pytest.raises(ConfigError, match="Make the plan anew with `moeflow plan --json`"):
        read_plan(file)


def test_doctor_looks_at_the_model_that_was_planned_for(file, tmp_path):
    model = tmp_path / "model"
    write_tiny_mixtral(model)
    config = dataclasses.replace(ENGINE_CONFIG, model_path=str(model), num_threads=1)
    file.write_text(plan_to_json(dataclasses.replace(PLAN, config=config, settings={"quantize": "int8"})))
    done = CliRunner().invoke(main, ["doctor", "--plan", str(file), "--json", "--cache-dir", str(tmp_path)])
    found = {finding["topic"]: finding["found"] for finding in json.loads(done.stdout)}
    assert found["requests"] == "6 together, 512 tokens each at most"  # the model's context


@pytest.mark.slow
@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
@pytest.mark.parametrize("goal", GOALS)
def test_what_runs_a_plan_takes_requests_of_the_model_s_context(tmp_path, goal, monkeypatch):
    model, host, file = tmp_path / "model", tmp_path / "host.json", tmp_path / "plan.json"
    write_tiny_mixtral(model)
    host.write_text(machine_to_json(machine(ram=2 * 10**9)))
    lengths = ("--prompt-len", "20", "--gen-len", "8", "--batch-size", "3", "--goal", goal)
    monkeypatch.chdir(tmp_path)
    planned = CliRunner().invoke(main, ["plan", "model", "--machine", str(host), "--json", *lengths])
    assert planned.exit_code == 0, planned.output
    file.write_text(planned.stdout)
    monkeypatch.chdir("/")
    shell = ["generate", "--plan", str(file), "-p", "abc", "--cache-dir", str(tmp_path)]
    done = CliRunner().invoke(main, [*shell, "--max-tokens", "40", "--json"])  # the plan was for 28 in all
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["model"] == "model"
    assert "warning: the plan was made for round, not for this one" in done.stderr
    too_long = CliRunner().invoke(main, [*shell, "--max-tokens", "600"])
    assert too_long.exit_code != 0
    assert "512" in too_long.stderr
    planned = CliRunner().invoke(main, ["serve", "--plan", str(file), "--explain", "--cache-dir", str(tmp_path)])
    assert planned.exit_code == 0, planned.output
    assert "384.0 KiB in memory" in planned.stdout  # 3 requests of 512 tokens, 256 bytes each
