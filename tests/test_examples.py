"""The packages in `examples/`, as if they were installed: each adds its row, and its addition computes.

A package is installed like with `pip install -e`: the path has its folder and its entry points.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import OlmoeConfig

from moeflow import LLM, SamplingParams
from moeflow.kernels.cpu import extension
from moeflow.planner.hardware.hardware_json import machine_to_json
from tests.documents import commands_in_blocks
from tests.forked_commands import forked_commands
from tests.models.parity import SHAPE, random_model
from tests.planner.examples import machine
from tests.planner.simulator.traces import make_trace
from tests.readers_machine import write_models
from tests.tiny_mixtral import write_byte_tokenizer, write_tiny_mixtral
from tests.workload.routing_files import write_trace

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(file.parent for file in ROOT.glob("examples/*/pyproject.toml"))
MOEFLOW = ("-m", "moeflow")
PROMPT = "--prompt=Hello", "--max-tokens=8", "--temperature=0"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Yield a function that runs Python with all examples installed, and returns the output."""
    site = tmp_path_factory.mktemp("site")
    for example in EXAMPLES:
        project = tomllib.loads((example / "pyproject.toml").read_text())["project"]
        info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        lines = [
            line
            for group, points in project["entry-points"].items()
            for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
        ]
        (info / "entry_points.txt").write_text("\n".join([*lines, ""]))
    path = os.pathsep.join(map(str, [site, ROOT, *EXAMPLES]))
    imported = "torch", "transformers.models.mixtral.modeling_mixtral"
    with forked_commands(tmp_path_factory.mktemp("printed"), imported, PYTHONPATH=path) as run:
        yield run


def test_a_policy_and_a_predictor_are_in_the_help_and_are_replayed(run, tmp_path):
    assert re.search(
        r"--policy \[[^]]*lru-2[^]]*belady\]", " ".join(run(*MOEFLOW, "simulate", "cache", "--help").split())
    )
    trace = write_trace(tmp_path / "routing", chained(make_trace(400, top_k=1)))
    names = ("--policy", "lru-2", "--policy", "belady", "--predictor", "none", "--predictor", "transitions")
    shown = run(*MOEFLOW, "simulate", "cache", "--routing", str(trace), "--slots", "30%", *names, "--json")
    results = {(one["policy"], one["predictor"]): one for one in map(json.loads, shown.splitlines())}
    demanded = {key: one["misses"] for key, one in results.items()}
    assert demanded["belady", "none"] < demanded["lru-2", "none"]
    assert results["lru-2", "transitions"]["used_bytes"] > 0


@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
def test_the_documented_command_serves_with_the_policy(run, tmp_path):
    """As printed, where a reader has the built-in model. `--explain` shows the memory and ends it before it serves."""
    page = (ROOT / "docs" / "guides" / "extend.md").read_text()
    (line,) = [it.line for it in commands_in_blocks(page) if "--expert-policy lru-2" in it.line]
    write_models(tmp_path, tmp_path)
    code = f"""
import os, sys
os.environ["HOME"] = {str(tmp_path)!r}
sys.argv = {[*shlex.split(line), "--explain"]!r}
from moeflow.cli.main import main
main()
"""
    assert "900.0 MiB" in run("-c", code)


def chained(trace):
    """Return a trace with each layer's expert determined by the expert of the layer before."""
    for one in trace.passes:
        for layer in range(1, len(one.ids)):
            one.ids[layer] = (one.ids[layer - 1] * 5 + 3) % trace.header.num_experts
    return trace


def test_a_model_from_disk_answers_the_same_with_them(run):
    code = """
import tempfile, pathlib
from tests.engine.test_streamed_model import resident_config, run, streamed_config
from tests.tiny_mixtral import write_tiny_mixtral
folder = pathlib.Path(tempfile.mkdtemp())
write_tiny_mixtral(folder / "model", num_local_experts=8, num_hidden_layers=3)
streamed = streamed_config(folder / "model", folder / "slabs", 6, "lru-2", "transitions")
print(run(streamed) == run(resident_config(folder / "model")))
"""
    assert run("-c", code).strip() == "True"


def test_a_pipeline_and_a_machine_are_simulated(run):
    names = ("--pipeline", "one-ahead", "--pipeline", "cgopipe")
    sizes = ("--batch-size", "96", "--micro-batch", "32", "--json")
    shown = run(*MOEFLOW, "simulate", "pipeline", "--machine", "workstation", "--model", "mixtral-8x7b", *names, *sizes)
    speeds = {one["pipeline"]: one["tokens_per_s"] for one in map(json.loads, shown.splitlines())}
    assert 0 < speeds["one-ahead"] <= speeds["cgopipe"]


def test_a_pipeline_computes_the_same_tokens(run):
    code = """
import tempfile
from tests.engine.offload.offloaded_runs import FAMILIES, config, offloaded, run
from tests.documents import commands_in_blocks
from tests.forked_commands import forked_commands
from tests.models.parity import random_model
folder = tempfile.mkdtemp()
random_model(FAMILIES["olmoe"]).save_pretrained(folder)
print(run(offloaded(folder, "one-ahead", 3)) == run(config(folder)))
"""
    assert run("-c", code).strip() == "True"


def test_the_streams_of_the_pipeline_keep_what_all_promise(run):
    tests = ["tests/pipeline/test_offloading.py", "-k", "one-ahead or every_pipeline", "-q", "-p", "no:cacheprovider"]
    tests += ["-W", "ignore:Module already imported"]
    assert re.search(r"[3-9] passed", run("-m", "pytest", *tests))


def test_a_layout_is_in_the_help_and_is_simulated_measured_and_planned(run, tmp_path):
    assert re.search(r"--expert-layout \[[^]]*everywhere\]", " ".join(run(*MOEFLOW, "serve", "--help-all").split()))
    names = ("--layout", "everywhere", "--layout", "expert", "--json")
    routing = ("--ranks", "4", "--tokens", "4000", "--skew", "0.9", "--skew-experts", "1")
    shown = run("-m", "studies.parallel.simulated", "--machine", "h100", "--model", "mixtral-8x7b", *routing, *names)
    simulated = {one["layout"]: one for one in map(json.loads, shown.splitlines())}
    assert simulated["everywhere"]["work_max_over_mean"] < 1.2 < simulated["expert"]["work_max_over_mean"]
    assert simulated["everywhere"]["by_formula"]["seconds"] < simulated["expert"]["by_formula"]["seconds"]
    sizes = ("--ranks", "2", "--experts", "5", "--tokens", "16", "--hidden", "64", "--width", "64", "--repeats", "1")
    (record,) = map(json.loads, run("-m", "studies.parallel", *sizes, *names).splitlines())
    assert "everywhere" in record["layouts"]  # and its sums were compared with one process's
    write_tiny_mixtral(tmp_path, num_local_experts=5)
    (tmp_path / "host.json").write_text(machine_to_json(machine(ram=2 * 10**9)))
    ranks = ("--ranks", "2", "--expert-layout", "everywhere")
    planned = run(*MOEFLOW, "plan", str(tmp_path), "--machine", str(tmp_path / "host.json"), *ranks)
    assert "3 of the 5 experts of a layer at most, as everywhere places them" in " ".join(planned.split())


def test_ranks_compute_the_same_tokens_in_a_layout_of_ones_own(run):
    code = """
import tempfile
from tests.engine.ranks.mixed_requests import config_of, run
from tests.tiny_mixtral import write_tiny_mixtral
folder = tempfile.mkdtemp()
write_tiny_mixtral(folder, num_local_experts=5)
(found, stats), (alone, _) = run(config_of(folder, num_ranks=2, expert_layout="everywhere")), run(config_of(folder))
print(found == alone, [rank.num_experts for rank in stats.ranks])
"""
    assert run("-c", code).strip() == "True [6, 6]"


def test_weights_in_a_format_of_ones_own_are_read(run, tmp_path):
    write_tiny_mixtral(tmp_path)
    expected = run(*MOEFLOW, "generate", str(rounded(tmp_path, tmp_path / "rounded")), *PROMPT)
    assert run(*MOEFLOW, "generate", str(tmp_path), *PROMPT) == expected


def rounded(folder, plain):
    """Store a folder's matrices in the example's format, and in another folder what its rows are then worth."""
    weights = load_file(folder / "model.safetensors")
    stored, widened = {}, {}
    for name, weight in weights.items():
        if weight.dim() == 2 and "embed" not in name and "lm_head" not in name:
            scales = weight.abs().amax(dim=1) / 127
            stored[name] = torch.round(weight / scales[:, None]).to(torch.int8)
            stored[name.removesuffix("weight") + "weight_scale"] = scales
            widened[name] = stored[name].float() * scales[:, None]
        else:
            stored[name] = widened[name] = weight
    plain.mkdir()
    for file in folder.glob("*.json"):
        (plain / file.name).write_text(file.read_text())
    save_file(stored, folder / "model.safetensors")
    save_file(widened, plain / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "absmax"}}))
    return plain


def test_a_family_of_ones_own_answers(run, tmp_path):
    model = random_model(OlmoeConfig(**SHAPE | {"vocab_size": 258}, num_experts=6, num_experts_per_tok=2))
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        {k: v for k, v in weights.items() if "q_norm" not in k and "k_norm" not in k}, tmp_path / "model.safetensors"
    )
    write_byte_tokenizer(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    named = {"model_type": "nanomoe", "architectures": ["NanoMoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config | named))
    assert "nanomoe" in run(*MOEFLOW, "doctor", str(tmp_path))
    assert run(*MOEFLOW, "generate", str(tmp_path), *PROMPT).strip()


def test_each_example_is_short_and_in_the_docs():
    page = (ROOT / "docs" / "guides" / "extend.md").read_text()
    assert len(EXAMPLES) >= 7
    for example in EXAMPLES:
        assert f"examples/{example.name}" in page


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'moeflow[ray]'")
@pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="Ray Data needs pyarrow: pip install 'ray[data]'"
)
def test_rows_of_ray_data_get_answers(tmp_path):
    write_tiny_mixtral(tmp_path / "model")
    prompts = [f"Story {number}" for number in range(20)]
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps({"id": n, "prompt": prompt}) + "\n" for n, prompt in enumerate(prompts)))
    command = (
        sys.executable,
        ROOT / "examples/ray_data.py",
        tmp_path / "model",
        source,
        tmp_path / "answers",
        "1",
        "1",
    )
    environment = {**os.environ, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_ADDRESS": "local"}
    subprocess.run(command, check=True, timeout=300, env=environment)
    rows = [json.loads(line) for file in (tmp_path / "answers").iterdir() for line in file.read_text().splitlines()]
    with LLM(tmp_path / "model", threads=1) as llm:
        results = llm.generate(prompts, SamplingParams(max_tokens=64, temperature=0.0), progress=False)
    expected = [(n, result.prompt, result.outputs[0].text) for n, result in enumerate(results)]
    assert sorted((row["id"], row["prompt"], row["answer"]) for row in rows) == expected
