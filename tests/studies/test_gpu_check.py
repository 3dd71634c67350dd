"""The check of a GPU, with this machine as the device: its steps, its output, and its few dependencies."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from moeflow.planner.model_files import shipped_models
from studies import stand_ins
from studies.gpu_check import command, processes
from studies.gpu_check.findings import Findings
from studies.gpu_check.options import STEPS, parsed, steps_of
from studies.gpu_check.pipelines import hollow, overlap, tokens
from studies.gpu_check.pipelines.timed_devices import at_once, merged
from studies.gpu_check.report import Report, aligned
from studies.gpu_check.resident.accuracy import relative_error
from tests.forked_commands import lasting_commands

ROOT = Path(__file__).parent.parent.parent
SIZES = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 97}
# As on a machine where nothing but torch and transformers is installed, and nothing is compiled.
BARE = """
import importlib.machinery as machinery, sys
find = machinery.PathFinder.find_spec.__func__
hidden = {"msgspec", "isal", "psutil", "gguf", "zmq", "scipy", "fastapi", "prometheus_client"}
def find_others(cls, name, path=None, target=None):
    return None if name.split(".")[0] in hidden else find(cls, name, path, target)
machinery.PathFinder.find_spec = classmethod(find_others)
sys.modules["moeflow.kernels._cpu"] = None
"""


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    config = json.loads(shipped_models()["mixtral-8x7b"].read_text())
    (tmp_path / "shape.json").write_text(json.dumps({**config, **SIZES, "num_key_value_heads": 2}))
    for module in (tokens, overlap):
        monkeypatch.setattr(module, "OFFLOADING", ("cgopipe", "sequential"))
    monkeypatch.setattr(tokens, "CUTS", tokens.CUTS[:2])
    return [
        "pipelines",
        *("--device", "emulated:{memory},1000,torch"),
        *("--memory", "16MiB"),
        *("--shape", str(tmp_path / "shape.json")),
        *("--middle", "8", "--requests", "4", "--micro-batch", "3"),
        *("--scratch", str(tmp_path)),
        *("--out", str(tmp_path / "out.json")),
    ]


def outcome(arguments, tmp_path, step):
    assert command.main([*arguments, "--step", step]) == 0
    return json.loads((tmp_path / "outcome.json").read_text())["result"]


NUM_DTYPES = {  # of kernels that do not take all
    "recurrence in chunks": 2,
    "sampling": 1,
    "changes of logits": 1,
    "log-probabilities": 1,
    "ranks": 1,
}


def rehearsed(group, tmp_path, names=()):
    """Run steps of a group in software, by default all, and return them by name."""
    pytest.importorskip("triton", reason="Triton has no wheel for this machine")
    out, names = tmp_path / "out.json", names or list(STEPS[group])
    arguments = [group, "--device", "softgpu", "--scratch", str(tmp_path), "--out", str(out), "--only", *names]
    with mock.patch.object(command, "in_process", in_fork), redirect_stdout(io.StringIO()) as printed:
        assert command.main(arguments) == 0
    steps = {step["step"]: step for step in json.loads(out.read_text())["steps"]}
    assert list(steps) == names
    for name, step in steps.items():
        assert step["rows"], name
        assert f"{name} " in printed.getvalue()
    return steps


def in_fork(step, options, scratch, limit_s):
    """Run a step in a process that finds torch and transformers imported."""
    run = lasting_commands("triton", "studies.random_family", "transformers.models.mixtral.modeling_mixtral")
    given = ("--device", options.device, "--scratch", str(scratch), "--step", step.title)
    run("-m", "studies.gpu_check", step.group, *given)
    return {"seconds": 0.0, **json.loads((scratch / "outcome.json").read_text())}


@pytest.mark.slow
def test_every_step_about_a_hybrid_model_runs_in_software(tmp_path):
    steps = rehearsed("hybrid", tmp_path)
    seam = steps["seam"]["result"]["batch 1"]
    assert seam["floor"] == pytest.approx(seam["flag"] + seam["to device"], abs=0.011)
    shares = steps["tokens"]["result"]["qwen3_moe"]
    assert [shares[f"float32, {number} on the GPU"] for number in (0, 4)] == [1, 1]
    times = steps["speed"]["result"]["seconds"]
    assert all(set(of_task) == {"hybrid", "streaming", "CPU alone"} for of_task in times.values())
    assert 0 < steps["speed"]["result"]["hybrid, 2 layers, share of choices on the GPU"] < 1


@pytest.mark.slow
def test_steps_about_a_whole_resident_model_run_in_software(tmp_path):
    steps = rehearsed("resident", tmp_path, ["families", "attention", "loading"])
    assert steps["families"]["result"]["qwen3_moe"]["float32 graphs"] == 1


@pytest.mark.slow
@pytest.mark.thorough
def test_comparisons_of_whole_models_run_in_software(tmp_path):
    steps = rehearsed("resident", tmp_path, ["decode", "experts", "prompt"])
    arms = steps["decode"]["result"]["whole_ms"]
    assert arms.keys() >= {"moeflow, graphs", "moeflow, eager", "moeflow, int4"}
    assert arms.keys() >= {"transformers, grouped_mm", "transformers, batched_mm"}


@pytest.mark.slow
@pytest.mark.thorough
def test_the_comparison_of_kernels_runs_in_software(tmp_path):
    steps = rehearsed("resident", tmp_path, ["kernels"])
    kernels = steps["kernels"]["result"]
    assert {len(errors) for name, errors in kernels.items() if name not in NUM_DTYPES} == {3}
    assert {name: len(kernels[name]) for name in NUM_DTYPES} == NUM_DTYPES
    assert kernels.keys() >= {
        "norm",
        "activation",
        "rotary table",
        "routing",
        "attention",
        "attention input",
        "experts",
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.slow
@pytest.mark.parametrize(
    "group", ["hybrid", *(pytest.param(it, marks=pytest.mark.thorough) for it in STEPS if it != "hybrid")]
)
def test_without_a_gpu_it_says_what_it_would_run(group, tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable}
    check = [ROOT / "scripts" / "gpu-check", group, "--out", "gpu-check.json"]
    done = subprocess.run(check, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    names = [step.title for step in steps_of(parsed([group]))]
    assert [line.strip() for line in done.stdout.splitlines()[1:]] == names
    assert ("pipelines 16GiB" in names) == (group == "pipelines")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("group", ["hybrid", "pipelines"])
def test_the_steps_of_a_model_that_does_not_fit_take_five_minutes(group):
    options = parsed([group])
    assert sum(step.limit_s for step in steps_of(options)) <= options.time_limit == 300


def test_all_groups_share_a_slot_and_steps_without_time_are_named(tmp_path, monkeypatch):
    began = []

    def in_process(step, options, scratch, limit_s):
        began.append((step.group, step.title, limit_s))
        return {"seconds": 1.0}

    monkeypatch.setattr(command, "in_process", in_process)
    given = ["all", "--device", "emulated:{memory},1000", "--out", str(tmp_path / "out.json")]
    assert command.main(given) == 0
    assert parsed(given).time_limit == 840
    named = {(group, title.split(" ")[0]) for group, title, _ in began}
    assert named == {(group, name) for group, steps in STEPS.items() for name in steps}
    assert [title for _, title, _ in began if "GiB" in title] == ["pipelines 16GiB", "pipelines 24GiB"]
    assert max(limit_s for *_, limit_s in began) == 170
    began.clear()
    monkeypatch.setattr(Report, "left_s", property(lambda report: 45.0 - 40.0 * len(began)))
    assert command.main(given) == 1
    assert [title for _, title, _ in began] == ["kernels"]
    assert began[0][2] == 45
    steps = json.loads((tmp_path / "out.json").read_text())["steps"]
    assert len(steps) == 16
    assert {step.get("error") for step in steps[1:]} == {"no time was left"}


def test_the_steps_of_a_resident_model_take_eight_minutes():
    assert parsed([]).group == "resident"
    assert parsed([]).time_limit == 480
    assert STEPS["resident"]["kernels"] + STEPS["resident"]["families"] + STEPS["resident"]["decode"] < 480


def test_only_some_steps_may_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "in_process", lambda *_: {"seconds": 1.0, "rows": [["x", "1 ms", "beside"]]})
    arguments = ["--device", "softgpu", "--out", str(tmp_path / "out.json")]
    assert command.main([*arguments, "--only", "decode", "kernels"]) == 0
    steps = json.loads((tmp_path / "out.json").read_text())["steps"]
    assert [step["step"] for step in steps] == ["kernels", "decode"]
    assert "decode   x  1 ms  beside\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main([*arguments, "--only", "speeds"])


def test_faults_fail_a_step_that_keeps_its_results(tmp_path, monkeypatch):
    step = SimpleNamespace(run=lambda options, findings: (findings.note(errors=3), findings.fault("too large")))
    monkeypatch.setattr(processes.importlib, "import_module", lambda name: step)
    options = parsed(["--scratch", str(tmp_path), "--step", "kernels"])
    assert processes.run_step(options) == 1
    assert json.loads((tmp_path / "outcome.json").read_text()) == {
        "result": {"errors": 3},
        "rows": [],
        "faults": ["too large"],
    }


def test_an_error_is_a_fault_and_others_have_their_turn(tmp_path, capsys):
    findings = Findings(tmp_path / "outcome.json")
    for name in ("first", "second"):
        with findings.of(name):
            findings.note(**{name: 1})
            assert name == "second", "too large"
    found = json.loads((tmp_path / "outcome.json").read_text())
    assert found["result"] == {"first": 1, "second": 1}
    assert len(found["faults"]) == 1
    assert found["faults"][0].startswith("first: AssertionError: too large")
    assert "Traceback" in capsys.readouterr().err


def test_passes_without_graphs_fail_a_step(tmp_path, monkeypatch):
    from moeflow.engine import decode_graphs

    step = SimpleNamespace(run=lambda options, findings: decode_graphs.logger.warning("without graphs: %s", "why"))
    monkeypatch.setattr(processes.importlib, "import_module", lambda name: step)
    assert processes.run_step(parsed(["--scratch", str(tmp_path), "--step", "kernels"])) == 1
    assert json.loads((tmp_path / "outcome.json").read_text())["faults"] == ["without graphs: why"]


def test_errors_are_relative_to_the_largest_number_of_a_row():
    wanted = torch.tensor([[100.0, 1.0], [0.1, 0.01]])
    assert relative_error(wanted + torch.tensor([[0.0, 1.0], [0.0, 0.0]]), wanted) == pytest.approx(0.01)
    assert relative_error(wanted + torch.tensor([[0.0, 0.0], [0.0, 0.01]]), wanted) == pytest.approx(0.1)
    assert relative_error(torch.full((2, 2), torch.nan), wanted) == float("inf")
    assert relative_error(torch.tensor([1, 2]), torch.tensor([1, 3])) == float("inf")


def test_columns_of_the_table_are_aligned():
    assert aligned([["a", "1"], ["long", "22"]]) == "a     1\nlong  22"
    assert aligned([]) == ""


def test_device_and_link_are_measured(arguments, tmp_path):
    found = outcome(arguments, tmp_path, "speeds")
    assert found["read_gb_per_s"] > 0
    assert len(found["to_device_gb_per_s"]) == len(found["to_host_gb_per_s"]) == 2


@pytest.mark.slow
def test_tokens_are_compared_with_the_plain_run(arguments, tmp_path):
    equal = outcome(arguments, tmp_path, "tokens")["equal_tokens"]
    assert equal["float32"] == {"cgopipe": [1], "sequential": [1]}
    assert min(equal["bfloat16"]["cgopipe"]) > 0.5


@pytest.mark.thorough
def test_other_tokens_fail_the_step(arguments, monkeypatch, capfd):
    monkeypatch.setattr(tokens, "answers", lambda config: {"0": [1, 2 if config.offload else 3]})
    assert command.main([*arguments, "--step", "tokens"]) == 1
    assert "float32 gives other tokens than the plain run" in capfd.readouterr().err


@pytest.mark.slow
def test_pipelines_are_rehearsed_in_software(tmp_path):
    given = ["pipelines", "--device", "softgpu", "--middle", "16", "--scratch", str(tmp_path)]
    options = parsed(given)
    steps = steps_of(options)
    assert [step.title for step in steps] == ["overlap", "tokens"]
    found = processes.in_process(steps[0], options, tmp_path, 300.0)
    assert "error" not in found, found["log"]
    assert all(0 <= each["link_busy"] <= 1 for each in found["result"].values())
    assert all(each["computing_s"] > 0 for each in found["result"].values())


@pytest.mark.slow
def test_overlap_is_found_where_there_is_some(arguments, tmp_path):
    found = outcome(arguments, tmp_path, "overlap")
    assert found["sequential"]["both_s"] == 0
    assert found["cgopipe"]["both_s"] > 0
    assert found["cgopipe"]["copying_s"] >= found["cgopipe"]["both_s"]


def test_time_that_two_share_is_measured():
    some = merged([(0.0, 1.0), (0.5, 2.0), (5.0, 6.0)])
    assert some == [(0.0, 2.0), (5.0, 6.0)]
    assert at_once(some, [(1.5, 5.5), (8.0, 9.0)]) == pytest.approx(1.0)


@pytest.mark.thorough
def test_the_pipelines_are_compared_on_a_hollow_model(arguments, tmp_path):
    assert outcome(arguments, tmp_path, "hollow")["narrow"] == 2
    result = outcome(arguments, tmp_path, "pipelines 16MiB")
    assert result["device"] == "emulated:4MiB,1000,torch"
    assert {record["pipeline"] for record in result["records"]} >= {"cgopipe", "flexgen", "zero-inference"}


def test_a_model_too_large_for_main_memory_is_made_narrower(arguments, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(hollow, "write_hollow_mixtral", lambda *arguments: written.append(arguments[2]))
    monkeypatch.setattr(hollow, "host_resources", lambda: SimpleNamespace(available_bytes=20e9))
    result = outcome([*arguments, "--shape", "mixtral-8x7b"], tmp_path, "hollow")
    assert result["narrow"] == written[0] == 4  # a sixteenth of 93 GB fits


@pytest.mark.thorough
def test_a_step_that_fails_leaves_the_others_their_turn(arguments, tmp_path, monkeypatch, capfd):
    really = command.in_process

    def in_process(step, options, scratch, limit_s):
        return really(step, options, scratch, limit_s) if step.name == "hollow" else {"seconds": 1.0, "result": {}}

    monkeypatch.setattr(command, "in_process", in_process)
    assert command.main([*arguments, "--shape", str(tmp_path / "nowhere.json")]) == 1
    report = json.loads((tmp_path / "out.json").read_text())
    steps = {step["step"]: step for step in report["steps"]}
    assert list(steps) == ["overlap", "tokens", "hollow", "pipelines 16MiB", "speeds"]
    assert [name for name, step in steps.items() if "error" in step] == ["hollow"]
    assert any("nowhere.json" in line for line in steps["hollow"]["log"])


def test_a_step_that_hangs_is_ended_and_leaves_what_it_found(arguments, tmp_path):
    Findings(tmp_path / "outcome.json").note(first=1)
    options = parsed(arguments)
    ended = processes.in_process(steps_of(options)[-1], options, tmp_path, 0.05)
    assert ended["error"] == "was not done after 0 s"
    assert ended["result"] == {"first": 1}


@pytest.mark.thorough
@pytest.mark.parametrize(("group", "step"), [("pipelines", "tokens"), ("resident", "families")])
def test_torch_and_transformers_are_enough(group, step, arguments, tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sitecustomize.py").write_text(BARE)
    (tmp_path / "few.py").write_text(
        "import sys\nfrom studies import gpu_check\nfrom studies.gpu_check import command\n"
        "assert gpu_check.STAND_INS == ['msgspec', 'isal', 'psutil']\n"
        "if sys.argv[1] == 'pipelines':\n    from studies.gpu_check.pipelines import tokens\n"
        "    tokens.OFFLOADING, tokens.CUTS = ('cgopipe',), tokens.CUTS[:1]\n"
        "sys.exit(command.main(sys.argv[1:]))"
    )
    given = arguments if group == "pipelines" else ["resident", "--device", "softgpu", "--scratch", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'bare'}:{ROOT}"}
    started = [sys.executable, str(tmp_path / "few.py"), *given, "--step", step]
    done = subprocess.run(started, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "outcome.json").exists()


def test_nothing_is_replaced_that_is_installed():
    assert stand_ins.install() == []
