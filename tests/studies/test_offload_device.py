"""A model larger than its GPU: each way is configured as it is named, and llama.cpp's benchmark is read."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import gguf
import msgspec
import pytest

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import ConfigError, EngineError
from moeflow.core.hardware import DEVICE, RAM
from moeflow.core.units import GIB
from moeflow.kernels.cpu import extension
from moeflow.pipeline.catalog import OFFLOADING
from moeflow.planner import pipeline_choice
from moeflow.planner.hardware.gpu_figures import GpuFigures
from moeflow.planner.hardware.host import HostResources
from moeflow.planner.hardware.machine_files import load_machine
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from studies.offload import device_ways, llama_bench
from studies.offload.__main__ import DEVICE_CASES
from studies.offload.device_table import device_table
from studies.offload.device_ways import CPU, HYBRID, STREAMING, Device, ways
from studies.offload.llama_bench import LlamaBench, num_cpu_layers
from studies.peers import model
from studies.peers.workers import moeflow_engine
from studies.peers.workers.moeflow_engine import MoeflowWorker
from tests.planner.holes import write_holes
from tests.studies.running import run
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())

MACHINE = HostResources(4, 64 * GIB, 32 * GIB, "cuda:0", 20 * GIB, process_bytes=GIB)
CASES = list(DEVICE_CASES.values())


def test_each_way_is_configured_as_it_is_named(tmp_path, monkeypatch):
    card = load_machine("l4")
    figures = GpuFigures(card.level(DEVICE), card.link(RAM, DEVICE), card.link(DEVICE, RAM))
    monkeypatch.setattr(pipeline_choice, "gpu_figures", lambda *_: figures)
    write_holes(tmp_path, (32000, 2048, 768, 8, 32, 4, 128, 8))
    found = ways(tmp_path, Device.of("cuda:0:6GiB"), {"max_model_len": 512, "max_num_seqs": 4})
    assert [it.name for it in found] == [HYBRID, CPU, STREAMING, *OFFLOADING]
    for way in found:
        settings = Settings(model=way.wish["model"], **way.wish["settings"])
        config = resolve(settings, machine_of=lambda _: load_machine("l4"), resources=MACHINE).config
        if way.name in OFFLOADING:
            assert config.offload.pipeline == way.name
            assert config.offload.cuda.memory_bytes == 6 * GIB
        else:
            assert config.offload is None
            assert (config.hybrid is None, config.device) == ((True, "cpu") if way.name == CPU else (False, "cuda:0"))


def test_without_a_gpu_only_the_cpu_and_pipelines_run():
    assert [it.name for it in ways(Path("x"), Device.of("emulated:1GiB,12,t4"), {})] == [CPU, *OFFLOADING]
    with pytest.raises(ConfigError, match="name its memory too, such as cuda:1:8GiB"):
        Device.of("cuda:1")


def test_where_all_passes_stream_the_engine_is_told(tmp_path, monkeypatch):
    write_holes(tmp_path, (32000, 2048, 768, 8, 32, 4, 128, 8))
    loaded = []

    def load(config):
        loaded.append(config)
        raise EngineError("not loaded")

    here = functools.partial(resolve, machine_of=lambda _: load_machine("l4"), resources=MACHINE)
    monkeypatch.setattr(moeflow_engine, "resolve", here)
    monkeypatch.setattr(moeflow_engine.Engine, "load", load)
    found = {it.name: it.wish for it in ways(tmp_path, Device.of("cuda:6GiB"), {})}
    for name in (HYBRID, STREAMING):
        with pytest.raises(EngineError, match="not loaded"):
            MoeflowWorker({**found[name], "threads": 2, "seed": 0})
    assert loaded[0].hybrid.stream_tokens != loaded[1].hybrid.stream_tokens == 1
    (fitting, *_) = ways(tmp_path, Device.of("cuda:18GiB"), {})
    with pytest.raises(SystemExit, match="the GPU holds the model"):
        MoeflowWorker({**fitting.wish, "threads": 2, "seed": 0})


class InThisProcess:
    """Stands for `EngineProcess`."""

    def __init__(self, contestant, *, threads, seed, log):
        if contestant.name == "flexgen":
            raise EngineError("flexgen ended with 1")
        self.worker = MoeflowWorker({**contestant.wish, "threads": threads, "seed": seed})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.worker._engine.close()

    def ask(self, do, **values):
        if do == "counters":
            return self.worker.counters()
        prompts = [[5 + number] * values["prompt_len"] for number in range(values.get("batch_size", 1))]
        if do == "prefill":
            return {"seconds": self.worker.prefill(prompts[0])}
        return {"seconds": self.worker.decode(prompts, values["new_tokens"])}


def test_ways_that_run_are_compared_and_others_are_explained(tmp_path, monkeypatch):
    write_tiny_mixtral(tmp_path / "tiny", max_position_embeddings=2048)
    monkeypatch.setattr(device_ways, "EngineProcess", InThisProcess)
    left_out = [word for name in ("zero", "fast", "cpu-attention", "sequential") for word in ("--without", name)]
    given = ["--device", "emulated:64MiB,1000", "--rounds", "2", "--threads", "1", *left_out]
    given += ["--folder", str(tmp_path), "--out", str(tmp_path / "out.jsonl")]
    done = run("studies.offload", "device", str(tmp_path / "tiny"), *given)
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [it["name"] for it in records] == [CPU, "cgopipe", "flexgen"]
    for record in records[:2]:
        assert {name: len(speeds) for name, speeds in record["speeds"].items()} == dict.fromkeys(DEVICE_CASES, 2)
    assert "Not run: flexgen: flexgen ended with 1" in done.output
    assert "Published, not measured here: llama.cpp" in done.output
    assert run("studies.offload", "show", str(tmp_path / "out.jsonl")).output.strip() in done.output
    assert "error" in run("studies.offload", "device", str(tmp_path), *given).output


def record(name, **more):
    speeds = {"decode, batch 1": [10.0, 12.0, 11.0]}
    machine = {"threads": 4}
    about = {"model": "m", "model_bytes": GIB, "device": "cuda:8GiB", "baseline": CPU, "machine": machine}
    return {**about, "name": name, "speeds": speeds, "error": "", **more}


def test_ratios_are_those_of_medians_and_only_a_missing_rival_is_quoted():
    pairs = {"gpu_pairs_total": 30, "cpu_pairs_total": 10}
    llama = record("llama.cpp", speeds={"decode, batch 1": [22.0]}, version="1 (a)", gpu="a card")
    table = device_table([record(HYBRID, speeds={"decode, batch 1": [33.0]}, counters=pairs), record(CPU), llama])
    assert [row[2] for row in table.rows] == ["3.00", "1.00", "2.00"]
    assert table.rows[1][1] == "11.0 (10.0-12.0)"
    assert [row[-1] for row in table.rows] == ["75%", "", ""]
    assert not any("Published" in note for note in table.notes)
    without = device_table([record(CPU), llama | {"gpu": ""}])
    assert sum("Published" in note for note in without.notes) == 4
    assert device_table([record(HYBRID)]).rows[0][2] == ""


PROGRAM = """#!{python}
import json, sys
rest = sys.argv[1:]
if "-ngl" in rest and "99" in rest and "7" in rest:
    sys.exit("no memory")
open({log!r}, "w").write(" ".join(rest))
common = {{"build_number": 5, "build_commit": "ab", "gpu_info": "card" if "99" in rest else "", "backends": "CUDA"}}
print(json.dumps({{"n_prompt": 512, "n_gen": 0, "samples_ts": [100.0, 110.0], **common}}))
print(json.dumps({{"n_prompt": 0, "n_gen": 16, "samples_ts": [5.0, 6.0], **common}}))
"""


def test_llama_cpp_s_benchmark_is_asked_for_the_same_and_read(tmp_path):
    program, log = tmp_path / "llama-bench", tmp_path / "log"
    program.write_text(PROGRAM.format(python=sys.executable, log=str(log)))
    program.chmod(0o755)
    bench = LlamaBench(program, tmp_path / "x.gguf", 3)
    found = bench.run(CASES, threads=4, rounds=2)
    assert found.speeds == {"prefill 512": [100.0, 110.0], "decode, batch 1": [5.0, 6.0]}
    assert (found.gpu, found.version) == ("card", "5 (ab)")
    asked = log.read_text()
    assert f"-m {tmp_path}/x.gguf -ngl 99 --n-cpu-moe 3 -t 4 -r 2" in asked
    assert asked.endswith("-p 512 -n 16")
    measurement = device_ways.Measurement(CASES, 4, 2, 0, tmp_path, lambda _: None)
    named = measurement.of_llama(msgspec.structs.replace(bench, num_cpu_layers=None))
    assert (named["name"], named["gpu"]) == (device_ways.LLAMA_CPU, "")
    failed = measurement.of_llama(msgspec.structs.replace(bench, num_cpu_layers=7))
    assert failed["speeds"] == {}
    assert "ended with 1: no memory" in failed["error"]


def test_the_least_number_of_layers_stays_on_the_cpu(tmp_path):
    write_tiny_mixtral(tmp_path / "tiny", num_hidden_layers=3)
    file = tmp_path / "tiny.gguf"
    model.write_gguf(tmp_path / "tiny", file, model.QUANTIZATIONS["bf16"])
    tensors = {it.name: int(it.n_bytes) for it in gguf.GGUFReader(file).tensors}
    experts = sum(size for name, size in tensors.items() if name.startswith("blk.2.") and "_exps." in name)
    checkpoint = open_checkpoint(tmp_path / "tiny")
    assert experts == 2 * sum(
        it.shape[0] * it.shape[1]
        for name, it in checkpoint.tensors.items()
        if "layers.2." in name and "experts" in name
    )
    checkpoint.close()
    dense = sum(size for name, size in tensors.items() if "_exps." not in name)
    room = llama_bench.HEADROOM_BYTES + dense
    for fitting in range(4):
        assert num_cpu_layers(file, room + fitting * experts) == 3 - fitting
    assert num_cpu_layers(file, room + experts - 1) == 3
