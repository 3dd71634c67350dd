"""The real engine runs a plan, and every predicted figure has a measured counterpart."""

from __future__ import annotations

import json
import types

import pytest
from click.testing import CliRunner

from moeflow.bench.engine_speed import SetBackError, SpeedCase
from moeflow.bench.plan_validation import LONG_S, CheckRow, PlanValidation, _Measured
from moeflow.cli.main import main
from moeflow.cli.plan.output import check_table
from moeflow.core.plan import plan_from_json
from moeflow.kernels.cpu import extension
from moeflow.planner.apply_plan import apply_plan
from moeflow.planner.hardware import calibrate
from moeflow.planner.hardware.hardware_json import machine_to_json
from moeflow.planner.hardware.this_machine import machine_file
from tests.engine.offload.offloaded_runs import config, run
from tests.planner.examples import machine
from tests.tiny_mixtral import write_tiny_mixtral


def test_errors_are_shares_of_what_was_measured():
    assert CheckRow("a", "ms", 150.0, 100.0).error == pytest.approx(0.5)
    assert CheckRow("a", "s", 1.0, 0.0).error == 0.0
    table = check_table([CheckRow("speed", "ms", 90.0, 100.0), CheckRow("peak", "bytes", 2.0**20, 2.0**21)])
    assert table.rows == (("speed", "90 ms", "100 ms", "-10.0%"), ("peak", "1.0 MiB", "2.0 MiB", "-50.0%"))
    assert table.notes == ("Median error of speeds: 10.0%.",)


def test_what_is_read_from_disk_is_told_apart_from_how_long_that_takes():
    rows = [CheckRow("speed", "ms", 150.0, 100.0, 95.0), CheckRow("peak", "bytes", 1.0, 1.0)]
    table = check_table(rows)
    assert [row[3:] for row in table.rows] == [("+50.0%", "-5.0%"), ("+0.0%", "")]
    assert "From actual reads: 5.0%" in table.notes[1]


@pytest.fixture(autouse=True)
def _is_as_measured(monkeypatch):
    monkeypatch.setattr(calibrate, "is_as_measured", lambda *_: True)
    monkeypatch.setattr(calibrate, "measure_kernels", lambda machine, *_, **__: machine)


def planning_shell(tmp_path, *options):
    write_tiny_mixtral(
        tmp_path / "model", max_position_embeddings=256, num_hidden_layers=4, num_local_experts=64, intermediate_size=64
    )
    file = machine_file(tmp_path, 1)
    file.parent.mkdir()
    file.write_text(machine_to_json(machine(ram=2 * 10**9)))  # as if measured
    lengths = ("--prompt-len", "24", "--gen-len", "12", "--batch-size", "3", "--threads", "1")
    return ["plan", str(tmp_path / "model"), "--json", "--cache-dir", str(tmp_path), *lengths, *options]


def checked(tmp_path, *options):
    done = CliRunner().invoke(main, [*planning_shell(tmp_path, *options), "--validate"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
def test_what_was_planned_is_run(tmp_path):
    found = checked(tmp_path)
    rows = {row["name"]: row for row in found["checked"]}
    names = ["decode, batch 1", "decode, batch 3", "first token of 24", "all speeds' times together", "peak memory"]
    assert list(rows) == names
    assert all(row["predicted"] > 0 and row["measured"] > 0 for row in rows.values())
    assert found["plan"]["forecast"]["policy"]["batch_size"] == 3


@pytest.mark.slow
@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
@pytest.mark.parametrize(
    "device",
    ["emulated:8MiB,1", pytest.param("emulated:8MiB,1,t4", marks=pytest.mark.thorough), "emulated:8MiB,1,torch"],
)
def test_a_plan_for_an_emulated_device_is_run(tmp_path, device):
    found = checked(tmp_path, "--device", device)
    rows = {row["name"]: row for row in found["checked"]}
    assert {"decode, batch 1", "decode, batch 3", "first token of 24"} <= set(rows)
    assert all(row["predicted"] > 0 and row["measured"] > 0 for row in rows.values())
    assert found["plan"]["config"]["offload"]["micro_batch_tokens"] <= 3


@pytest.mark.slow
@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
def test_a_plan_for_an_emulated_device_runs_as_printed(tmp_path):
    shell = planning_shell(tmp_path, "--device", "emulated:8MiB,1")
    printed = CliRunner().invoke(main, shell)
    assert printed.exit_code == 0, printed.output
    made = plan_from_json(printed.stdout, "printed")
    assert made.forecast is not None
    applied = apply_plan(made, {})
    assert applied.config == made.config
    assert run(applied.config, (5, 24, 17)) == run(config(tmp_path / "model"), (5, 24, 17))


def test_a_batch_that_finds_no_room_becomes_smaller(monkeypatch):
    check = object.__new__(PlanValidation)
    check.cases, check._measured = [SpeedCase(1, 8, 2), SpeedCase(16, 8, 2)], {}
    monkeypatch.setattr(check.__class__, "_decode_case", lambda _, size: SpeedCase(size, 8, 2))
    monkeypatch.setattr(check.__class__, "_repeats", lambda *_: 2)
    ran = []

    def run(_, case, repetition):
        if case.batch_size > 10:
            raise SetBackError("no room")
        ran.append((case.batch_size, repetition))

    monkeypatch.setattr(check.__class__, "_run", run)
    check.run(lambda _: None, lambda: None)
    assert ran == [(1, 0), (9, 0), (1, 1), (9, 1)]
    assert [case.batch_size for case in check.cases] == [1, 9]


def test_another_machine_cannot_be_checked():
    done = CliRunner().invoke(main, ["plan", "mixtral-8x7b", "--machine", "t4", "--validate"])
    assert done.exit_code == 2
    assert "--validate runs the model on this machine" in done.output


@pytest.mark.parametrize("has_device", [False, True])
@pytest.mark.parametrize("is_long", [False, True])
def test_a_long_case_runs_once_unless_its_first_run_measures_the_host(monkeypatch, has_device, is_long):
    check = object.__new__(PlanValidation)
    check.config = types.SimpleNamespace(offload=object() if has_device else None)
    check._measured = {}
    seconds = 2 * LONG_S if is_long else LONG_S / 2
    monkeypatch.setattr(check.__class__, "_predict", lambda *_: types.SimpleNamespace(whole_s=seconds))
    rates = iter(range(100))

    def measure(self, case, _repetition):
        self._measured.setdefault(case, _Measured())
        return float(next(rates)), 0

    monkeypatch.setattr(check.__class__, "_measure", measure)
    check.cases = [case] = [SpeedCase(1, 8, 2)]
    check.run(lambda _: None, lambda: None)
    counted = [1.0] if has_device else [0.0]
    assert check._measured[case].rates == (counted if is_long else [1.0, 2.0, 3.0, 4.0, 5.0])
