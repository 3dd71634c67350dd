"""The check of a GPU, with this machine as the device: its steps, its output, and its few dependencies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moeflow.planner.model_files import shipped_models
from studies import gpu_check, stand_ins

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
    monkeypatch.setattr(gpu_check, "OFFLOADING", ("cgopipe", "sequential"))
    monkeypatch.setattr(gpu_check, "CUTS", gpu_check.CUTS[:1])
    return [
        "--device",
        "emulated:{memory},1000,torch",
        *("--memory", "16MiB"),
        *("--shape", str(tmp_path / "shape.json")),
        *("--middle", "8", "--requests", "4", "--micro-batch", "3"),
        *("--scratch", str(tmp_path)),
        *("--out", str(tmp_path / "out.json")),
    ]


def outcome(arguments, tmp_path, step):
    assert gpu_check.main([*arguments, "--step", step]) == 0
    return json.loads((tmp_path / "outcome.json").read_text())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.thorough
def test_without_a_gpu_it_says_what_it_would_run(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        [ROOT / "scripts" / "gpu-check"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for step in ("speeds", "tokens", "overlap", "hollow", "pipelines 16GiB", "pipelines 24GiB"):
        assert f"  {step}\n" in done.stdout
    assert list(tmp_path.iterdir()) == []


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
    monkeypatch.setattr(gpu_check, "answers", lambda config: {"0": [1, 2 if config.offload else 3]})
    assert gpu_check.main([*arguments, "--step", "tokens"]) == 1
    assert "float32 gives other tokens than the plain run" in capfd.readouterr().err


@pytest.mark.slow
def test_overlap_is_found_where_there_is_some(arguments, tmp_path):
    found = outcome(arguments, tmp_path, "overlap")
    assert found["sequential"]["both_s"] == 0
    assert found["cgopipe"]["both_s"] > 0
    assert found["cgopipe"]["copying_s"] >= found["cgopipe"]["both_s"]


def test_time_that_two_share_is_measured():
    some = gpu_check.merged([(0.0, 1.0), (0.5, 2.0), (5.0, 6.0)])
    assert some == [(0.0, 2.0), (5.0, 6.0)]
    assert gpu_check.at_once(some, [(1.5, 5.5), (8.0, 9.0)]) == pytest.approx(1.0)


@pytest.mark.thorough
def test_the_pipelines_are_compared_on_a_hollow_model(arguments, tmp_path):
    assert outcome(arguments, tmp_path, "hollow")["narrow"] == 1
    result = outcome(arguments, tmp_path, "pipelines 16MiB")
    assert result["device"] == "emulated:16MiB,1000,torch"
    assert {record["pipeline"] for record in result["records"]} >= {"cgopipe", "flexgen", "zero-inference"}


def test_a_model_too_large_for_main_memory_is_made_narrower(arguments, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(gpu_check, "write_hollow_mixtral", lambda *arguments: written.append(arguments[2]))
    monkeypatch.setattr(gpu_check, "host_resources", lambda: gpu_check.argparse.Namespace(available_bytes=40e9))
    result = outcome([*arguments, "--shape", "mixtral-8x7b"], tmp_path, "hollow")
    assert result["narrow"] == written[0] == 2  # a quarter of 93 GB fits


@pytest.mark.thorough
def test_a_step_that_fails_leaves_the_others_their_turn(arguments, tmp_path, monkeypatch, capfd):
    really = gpu_check.in_process

    def in_process(step, options, scratch, limit_s):
        return really(step, options, scratch, limit_s) if step == "hollow" else {"seconds": 1.0, "result": {}}

    monkeypatch.setattr(gpu_check, "in_process", in_process)
    assert gpu_check.main([*arguments, "--shape", str(tmp_path / "nowhere.json")]) == 1
    report = json.loads((tmp_path / "out.json").read_text())
    steps = {step["step"]: step for step in report["steps"]}
    assert list(steps) == ["speeds", "tokens", "overlap", "hollow", "pipelines 16MiB"]
    assert [name for name, step in steps.items() if "error" in step] == ["hollow"]
    assert any("nowhere.json" in line for line in steps["hollow"]["log"])


def test_a_step_that_hangs_is_ended(arguments, tmp_path):
    options = gpu_check.parsed(arguments)
    assert gpu_check.in_process("speeds", options, tmp_path, 0.05)["error"] == "was not done after 0 s"


@pytest.mark.thorough
def test_torch_and_transformers_are_enough(arguments, tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sitecustomize.py").write_text(BARE)
    (tmp_path / "few.py").write_text(
        "import sys\nfrom studies import gpu_check\ngpu_check.OFFLOADING = ('cgopipe',)\n"
        "gpu_check.CUTS = gpu_check.CUTS[:1]\nassert gpu_check.STAND_INS == ['msgspec', 'isal', 'psutil']\n"
        "sys.exit(gpu_check.main(sys.argv[1:]))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'bare'}:{ROOT}"}
    command = [sys.executable, str(tmp_path / "few.py"), *arguments, "--step", "tokens"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "outcome.json").exists()


def test_nothing_is_replaced_that_is_installed():
    assert stand_ins.install() == []
