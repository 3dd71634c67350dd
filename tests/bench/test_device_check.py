"""A plan for a played device is run by the real engine: each kind of task is set beside what was predicted of it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from moeflow.cli.main import main
from moeflow.core.hardware_json import machine_to_json
from moeflow.kernels import cpu
from moeflow.planner import this_machine
from moeflow.planner.this_machine import machine_file
from tests.planner.examples import machine
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not cpu.is_available(), reason=cpu.why_not()),
]


def checked(tmp_path, monkeypatch, *options):
    monkeypatch.setattr(this_machine, "is_as_measured", lambda *_: True)
    write_tiny_mixtral(tmp_path / "model", max_position_embeddings=256, num_hidden_layers=4)
    file = machine_file(tmp_path, 1)
    file.parent.mkdir()
    file.write_text(machine_to_json(machine(ram=2 * 10**9)))
    lengths = ("--prompt-len", "24", "--gen-len", "8", "--threads", "1", "--device", "emulated:540KiB,0.01")
    shell = ["plan", str(tmp_path / "model"), "--check", "--cache-dir", str(tmp_path), *lengths, *options]
    done = CliRunner().invoke(main, shell)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_job_and_each_kind_of_task_are_measured(tmp_path, monkeypatch):
    rows = {
        row["name"]: row for row in json.loads(checked(tmp_path, monkeypatch, "--batch-size", "3", "--json"))["checked"]
    }
    assert {
        "generated, prefill included",
        "decode, all together",
        "first token of 24",
        "all first tokens",
    } < rows.keys()
    assert {"weights to the device, a step", "device memory", "peak memory"} < rows.keys()
    assert all(row["predicted"] > 0 and row["measured"] > 0 for row in rows.values() if row["unit"] != "s")
    assert rows["device memory"]["measured"] <= 540 * 2**10


def test_a_table_is_for_people(tmp_path, monkeypatch):
    assert "weights to the device, a step" in checked(tmp_path, monkeypatch, "--batch-size", "2")
