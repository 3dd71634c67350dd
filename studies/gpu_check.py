"""Runs all that has never run on a GPU, in under ten minutes, and writes one JSON file of what came of it.

Steps, each in a process of its own, so that one that fails or hangs leaves the others their turn:

    speeds     the GPU's memory, arithmetic and link
    tokens     every pipeline on a small model, in float32 and bfloat16, against the plain run on the processor
    overlap    whether copies to the GPU and its computing take place at once, by CUDA events on their streams
    hollow     writes a Mixtral 8x7B whose experts are holes; a narrower one where main memory is too small
    pipelines  `studies/pipelines.py` on it, once for each size of the GPU's memory

Needs torch, transformers (for what it brings along: click, rich, numpy) and safetensors; what else is missing is
replaced (`stand_ins.py`). The file is rewritten after each step. Without a GPU it lists the steps that it would run.

    scripts/gpu-check --out gpu-check.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from studies import stand_ins

STAND_INS = stand_ins.install()

from moeflow.bench.records import commit, machine, versions  # noqa: E402
from moeflow.core.engine_config import EngineConfig  # noqa: E402
from moeflow.core.engine_messages import Submission  # noqa: E402
from moeflow.core.offload_config import EmulatedDeviceConfig, OffloadConfig  # noqa: E402
from moeflow.core.sampling_params import SamplingParams  # noqa: E402
from moeflow.core.units import GIB, MIB, parse_bytes  # noqa: E402
from moeflow.engine.engine import Engine  # noqa: E402
from moeflow.engine.offload import offloaded_model  # noqa: E402
from moeflow.models.registry import read_bare_config  # noqa: E402
from moeflow.pipeline.catalog import OFFLOADING  # noqa: E402
from moeflow.pipeline.devices.cuda_device import CudaDevice  # noqa: E402
from moeflow.pipeline.devices.emulated_device import EmulatedDevice  # noqa: E402
from moeflow.planner.hardware.calibrate_device import measure_device  # noqa: E402
from moeflow.planner.hardware.host import host_resources  # noqa: E402
from moeflow.planner.model_files import shipped_models  # noqa: E402
from moeflow.planner.resolve import resolve  # noqa: E402
from moeflow.settings.settings import Settings  # noqa: E402
from studies.hollow_model import write_hollow_mixtral  # noqa: E402

SMALL = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 512}
MIDDLE = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 4, "vocab_size": 512}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
CUTS = ((3, 0.4), (1, 0.0), (1000, 1.0))  # micro-batches, and the share of experts that stay
PROMPT_LENS = (5, 1, 60, 17, 33)
STEP_LIMITS_S = {"speeds": 60.0, "tokens": 180.0, "overlap": 60.0, "hollow": 90.0}  # pipelines share the remaining time
SPEEDS, TOKENS, OVERLAP, HOLLOW, PIPELINES = "speeds", "tokens", "overlap", "hollow", "pipelines"
NARROW = (1, 2, 4, 8, 16)
ROOM = 1.3  # main memory, as a multiple of the weights: two layers are staged, and there are keys and values
Spans = list[tuple[float, float]]  # seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all steps; return 0 if all succeeded, or if there is no GPU."""
    options = parsed(arguments)
    if options.step:
        return run_step(options)
    steps = [SPEEDS, TOKENS, OVERLAP, HOLLOW, *(f"{PIPELINES} {memory}" for memory in options.memory)]
    if "cuda" in options.device and not torch.cuda.is_available():
        print("torch finds no CUDA device here. On a machine with one, this would run:")
        print("\n".join(f"  {step}" for step in steps))
        return 0
    report = Report(options)
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=options.scratch) as scratch:
        for number, step in enumerate(steps):
            limit_s = STEP_LIMITS_S.get(step, report.left_s / (len(steps) - number))
            report.add(step, in_process(step, options, Path(scratch), min(limit_s, max(report.left_s, 1.0))))
    print(f"wrote {options.out}")
    return int(not report.is_good)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser("gpu-check", description="Run moeflow's CUDA path and write one JSON file.")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"), help="file to write")
    parser.add_argument("--device", default="cuda:0:{memory}", help="as --device of moeflow; {memory} is put in")
    parser.add_argument("--memory", nargs="+", default=["16GiB", "24GiB"], help="of the GPU, for the benchmark")
    parser.add_argument("--shape", default="mixtral-8x7b", help="of the benchmark's model: shipped, or a config.json")
    parser.add_argument("--middle", type=int, default=1, help="divides the widths of the model that overlap is seen on")
    parser.add_argument("--requests", type=int, default=512, help="decoded concurrently in the benchmark")
    parser.add_argument("--micro-batch", type=int, default=64, help="of these, computed at once")
    parser.add_argument("--time-limit", type=float, default=570.0, help="seconds for everything")
    parser.add_argument("--scratch", type=Path, help="folder for the model, which takes about 3 GB there")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


class Report:
    """The file, rewritten after each step."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._began_s = time.monotonic()
        self._steps: list[dict[str, Any]] = []
        self._about = {
            "kind": "gpu_check",
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": " ".join(sys.argv),
            "commit": commit(),
            "machine": machine(),
            "versions": versions(),
            "gpu": gpu(),
            "device": options.device,
            "stand_ins": STAND_INS,
        }

    @property
    def left_s(self) -> float:
        """The remaining time."""
        return float(self._options.time_limit - (time.monotonic() - self._began_s))

    @property
    def is_good(self) -> bool:
        """Whether all steps succeeded."""
        return all("error" not in step for step in self._steps)

    def add(self, name: str, outcome: dict[str, Any]) -> None:
        """Take down how a step ended, and write."""
        self._steps.append({"step": name, **outcome})
        print(f"{name}: {outcome.get('error', 'done')} ({outcome['seconds']} s)", flush=True)
        text = json.dumps({**self._about, "steps": self._steps}, indent=1)
        self._options.out.write_text(text + "\n", encoding="utf-8")


def gpu() -> dict[str, Any] | None:
    """Describe the GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / GIB, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }


def in_process(step: str, options: argparse.Namespace, scratch: Path, limit_s: float) -> dict[str, Any]:
    """Run a step in a separate process, and return its output or its failure."""
    began_s = time.monotonic()
    command = [sys.executable, "-m", "studies.gpu_check", "--step", step, "--scratch", str(scratch)]
    command += ["--device", options.device]
    for name in ("shape", "middle", "requests", "micro_batch"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    log = scratch / "log"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            process.wait(limit_s)
            error = None if process.returncode == 0 else f"ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            error = f"was not done after {limit_s:.0f} s"
    seconds = round(time.monotonic() - began_s, 1)
    file = scratch / "outcome.json"
    outcome: dict[str, Any] = {"seconds": seconds}
    if file.exists():
        outcome["result"] = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
    if error is not None:
        outcome |= {"error": error, "log": log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:]}
    return outcome


def run_step(options: argparse.Namespace) -> int:
    """Run one step in this process, and write its findings."""
    name, _, memory = options.step.partition(" ")
    steps: dict[str, Callable[[], Any]] = {
        SPEEDS: lambda: speeds(options),
        TOKENS: lambda: tokens(options),
        OVERLAP: lambda: overlap(options),
        HOLLOW: lambda: hollow(options),
        PIPELINES: lambda: pipelines(options, memory),
    }
    try:
        result = steps[name]()
    except Exception:
        traceback.print_exc()
        return 1
    (options.scratch / "outcome.json").write_text(json.dumps(result), encoding="utf-8")
    return 0


def speeds(options: argparse.Namespace) -> dict[str, Any]:
    """Measure device and link."""
    is_gpu = "cuda" in options.device
    sizes = {} if is_gpu else {"buffer_bytes": 4 * MIB, "matrix_size": 64}
    level, there, back = measure_device(torch.device("cuda" if is_gpu else "cpu"), 1, **sizes)
    assert level.processor is not None
    return {
        "read_gb_per_s": round(level.read_bytes_per_s / 1e9, 1),
        "tflops": {dtype: round(peak / 1e12, 2) for dtype, peak in level.processor.peak_flops_per_s},
        "to_device_gb_per_s": {rate.transfer_bytes: round(rate.bytes_per_s / 1e9, 2) for rate in there.rates},
        "to_host_gb_per_s": {rate.transfer_bytes: round(rate.bytes_per_s / 1e9, 2) for rate in back.rates},
    }


def tokens(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the greedy tokens of every pipeline with the plain run's: equal in float32, mostly so in bfloat16."""
    folder = shaped(options.scratch / "small", SMALL | HEADS)
    shares: dict[str, dict[str, list[float]]] = {}
    for dtype in ("float32", "bfloat16"):
        plain = answers(wished(folder, "cpu", dtype))
        for name in OFFLOADING:
            found = [answers(pipeline_on(options, folder, name, dtype, *cut)) for cut in CUTS]
            shares.setdefault(dtype, {})[name] = [round(equal_share(plain, each), 4) for each in found]
    exact = min(share for each in shares["float32"].values() for share in each)
    assert exact == 1.0, f"float32 gives other tokens than the plain run: {shares['float32']}"
    return {"equal_tokens": shares}


def overlap(options: argparse.Namespace) -> dict[str, Any]:
    """Return for each pipeline how long the device copied, computed, and did both at once."""
    widths = {name: MIDDLE[name] // options.middle for name in ("hidden_size", "intermediate_size")}
    folder = shaped(options.scratch / "middle", MIDDLE | HEADS | widths)
    found = {}
    for name in OFFLOADING:
        with timed_devices() as devices:
            answers(pipeline_on(options, folder, name, "bfloat16", 16, 0.0))
        (device,) = devices
        copied, computed = map(merged, device.spans())
        busy = [sum(end - start for start, end in spans) for spans in (copied, computed)]
        both = at_once(copied, computed)
        found[name] = {
            "copying_s": round(busy[0], 4),
            "computing_s": round(busy[1], 4),
            "both_s": round(both, 4),
            "overlap": round(both / min(busy), 3) if min(busy) else 0.0,
        }
    return found


def hollow(options: argparse.Namespace) -> dict[str, Any]:
    """Write the benchmark's model, as wide as main memory allows."""
    config_file = shipped_models().get(options.shape) or Path(options.shape)
    weights = 2 * read_bare_config(config_file).num_parameters
    available = host_resources().available_bytes
    fitting = [narrow for narrow in NARROW if ROOM * weights / narrow**2 <= available]
    if not fitting:
        raise MemoryError(f"{options.shape} does not fit into main memory, however narrow")
    write_hollow_mixtral(config_file, options.scratch / "model", fitting[0])
    (options.scratch / "narrow").write_text(str(fitting[0]))
    return {"narrow": fitting[0], "weights_gib": round(weights / fitting[0] ** 2 / GIB, 1)}


def pipelines(options: argparse.Namespace, memory: str) -> dict[str, Any]:
    """Run the comparison of pipelines on a GPU of so much memory; with a narrower model, on so much less."""
    narrow = int((options.scratch / "narrow").read_text())
    memory_bytes = parse_bytes(memory) // narrow**2
    sizes = ["--requests", str(options.requests), "--micro-batch", str(options.micro_batch), "--rounds", "1"]
    device = options.device.format(memory=f"{memory_bytes // MIB}MiB")
    code = "from studies import stand_ins; stand_ins.install(); import runpy; "
    code += "runpy.run_module('studies.pipelines', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", code, str(options.scratch / "model"), "--device", device, *sizes]
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, check=True)  # stderr is the step's
    return {"device": device, "narrow": narrow, "records": [json.loads(line) for line in done.stdout.splitlines()]}


def shaped(folder: Path, sizes: dict[str, int]) -> Path:
    """Write a Mixtral of these sizes, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(shipped_models()["mixtral-8x7b"].read_text(encoding="utf-8")) | sizes
    (folder / "shape.json").write_text(json.dumps(config), encoding="utf-8")
    write_hollow_mixtral(folder / "shape.json", folder / "model")
    return folder / "model"


def wished(folder: Path, device: str, dtype: str, **more: Any) -> EngineConfig:
    """Return a configuration for the comparisons."""
    limits = {"max_model_len": 112, "kv_cache_bytes": 8 * MIB, "max_num_seqs": 16, "max_num_batched_tokens": 96}
    return resolve(Settings(model=str(folder), device=device, dtype=dtype, kv_dtype=dtype, **limits, **more)).config


def pipeline_on(
    options: argparse.Namespace, folder: Path, name: str, dtype: str, micro_batch: int, share: float
) -> EngineConfig:
    """Return a configuration for a pipeline on the device."""
    device = options.device.format(memory="2GiB")
    return wished(folder, device, dtype, pipeline=name, micro_batch=micro_batch, resident_experts=share)


def answers(config: EngineConfig, num_tokens: int = 6) -> dict[str, list[int]]:
    """Return greedy tokens of a few requests that share a batch."""
    engine = Engine.load(config)
    found: dict[str, list[int]] = {}
    try:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        for number, length in enumerate(PROMPT_LENS):
            prompt = [(31 * number + 7 * place) % 500 + 2 for place in range(length)]
            engine.submit(Submission(f"{number}", prompt, sampling, seed=number))
            found[f"{number}"] = []
        while engine.has_work:
            for output in engine.step():
                assert not output.error, output.error
                found[output.request_id] += output.token_ids
    finally:
        engine.close()
    return found


def equal_share(one: dict[str, list[int]], other: dict[str, list[int]]) -> float:
    """Return the share of tokens that are the same."""
    return statistics.mean(a == b for name in one for a, b in zip(one[name], other[name], strict=True))


class TimedCuda:
    """`torch.cuda` for a `CudaDevice`, with an event at both ends of whatever a stream does."""

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}
        self._spans: dict[str, list[tuple[Any, Any]]] = {"up": [], "down": [], "compute": []}
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record()

    def Stream(self, device: torch.device) -> Any:
        """Make one; a device's are made in this order."""
        stream = torch.cuda.Stream(device)
        self._names[stream] = list(self._spans)[len(self._names)]
        return stream

    def Event(self, **options: Any) -> Any:
        """Make one."""
        return torch.cuda.Event(**options)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """Launch on a stream, between two events."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            start.record(stream)
            yield
            end.record(stream)
        self._spans[self._names[stream]].append((start, end))

    def synchronize(self, device: torch.device) -> None:
        """Wait for everything."""
        torch.cuda.synchronize(device)

    def spans(self, name: str) -> Spans:
        """Return when a stream worked."""
        torch.cuda.synchronize()
        since = self._origin.elapsed_time
        return [(since(start) / 1000, since(end) / 1000) for start, end in self._spans[name]]


class TimedGpu(CudaDevice):
    """A GPU that knows when it copied and computed."""

    def __init__(self, config: OffloadConfig) -> None:
        assert config.cuda is not None
        self._timed = TimedCuda()
        super().__init__(config.cuda, self._timed)

    def spans(self) -> tuple[Spans, Spans]:
        """Return when copies to the device and computing took place."""
        return self._timed.spans("up"), self._timed.spans("compute")


class TimedEmulation(EmulatedDevice):
    """An emulated device likewise."""

    def __init__(self, config: EmulatedDeviceConfig) -> None:
        super().__init__(config)
        self._copied: Spans = []
        self._computed: Spans = []

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `OffloadDevice`."""
        start = time.perf_counter()
        super().upload(target, source)
        self._copied.append((start, time.perf_counter()))

    @contextmanager
    def computing(self, num_bytes: int, flops: int) -> Iterator[None]:
        """See `OffloadDevice`."""
        start = time.perf_counter()
        with super().computing(num_bytes, flops):
            yield
        self._computed.append((start, time.perf_counter()))

    def spans(self) -> tuple[Spans, Spans]:
        """Return when copies to the device and computing took place."""
        return self._copied, self._computed


@contextmanager
def timed_devices() -> Iterator[list[TimedGpu | TimedEmulation]]:
    """Have models made in the block compute on devices that note times; yield these."""
    devices: list[TimedGpu | TimedEmulation] = []
    before = offloaded_model.make_device

    def make(config: OffloadConfig) -> TimedGpu | TimedEmulation:
        devices.append(TimedGpu(config) if config.emulated is None else TimedEmulation(config.emulated))
        return devices[-1]

    offloaded_model.make_device = make  # type: ignore[assignment]
    try:
        yield devices
    finally:
        offloaded_model.make_device = before


def at_once(some: Spans, others: Spans) -> float:
    """Return for how long both were at work; spans of each do not overlap among themselves."""
    return sum(max(min(end, last) - max(start, first), 0.0) for start, end in some for first, last in others)


def merged(spans: Spans) -> Spans:
    """Return the same time as spans that do not overlap among themselves."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


if __name__ == "__main__":
    sys.exit(main())
