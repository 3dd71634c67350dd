"""Another process finds the GPUs; a device setting selects one of them, with its free memory."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
import torch

from moeflow.planner.hardware import gpus, host
from moeflow.planner.hardware.gpus import Gpu, GpuSearch, find_gpus, tried_gpus, with_kernels
from moeflow.planner.hardware.host import host_resources

NO_COMPILER = "Failed to find C compiler; install gcc"
FOUND = [
    Gpu("cuda:0", free_bytes=3, has_bfloat16=False),
    Gpu("cuda:1", free_bytes=5),
    Gpu("cuda:2", problem="no kernel image"),
    Gpu("cuda:3", free_bytes=9, kernels_problem=NO_COMPILER),
]


@pytest.fixture
def three(monkeypatch):
    monkeypatch.setattr(host, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(gpus, "find_gpus", lambda _: GpuSearch(FOUND))


@pytest.mark.parametrize(
    ("device", "name", "free_bytes", "has_bfloat16"),
    [
        ("auto", "cuda:1", 5, True),
        ("cuda", "cuda:0", 3, False),
        ("cuda:1", "cuda:1", 5, True),
        ("cuda:1:2GiB", "cuda:1", 5, True),
        ("cuda:2GiB", "cuda:0", 3, False),
    ],
)
def test_what_is_free_is_read_of_the_gpu_that_is_asked_for(three, device, name, free_bytes, has_bfloat16):
    here = host_resources(device)
    assert (here.accelerator, here.accelerator_free_bytes, here.has_bfloat16) == (name, free_bytes, has_bfloat16)


def test_ranks_may_use_the_gpus_that_follow_as_far_as_they_compute(three):
    assert host_resources("cuda").accelerators_free_bytes == (3, 5)
    assert host_resources("cuda:1").accelerators_free_bytes == (5,)
    assert host_resources("cuda:2").accelerators_free_bytes == ()


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("cuda:2", "torch cannot compute on cuda:2: no kernel image"),
        ("cuda:4", "torch finds only cuda:0, cuda:1, cuda:2, cuda:3 here"),
    ],
)
def test_a_gpu_that_cannot_compute_is_none(three, device, why):
    here = host_resources(device)
    assert (here.accelerator, here.why_no_accelerator) == (None, why)


def test_a_gpu_without_kernels_is_the_last_choice(three):
    assert host_resources("cuda:3").why_no_kernels == NO_COMPILER
    assert host_resources("cuda:1").why_no_kernels == ""


@pytest.mark.parametrize(
    ("problem", "why"),
    [("", "torch finds no CUDA device here"), ("the driver is too old; update it", "the driver is too old; update it")],
)
def test_a_failed_search_is_told_with_its_cause(monkeypatch, tmp_path, problem, why):
    asked = []
    monkeypatch.setattr(host, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(gpus, "find_gpus", lambda folder: asked.append(folder) or GpuSearch([], problem))
    here = host_resources("auto", tmp_path)
    assert (here.accelerator, here.why_no_accelerator, asked) == (None, why, [tmp_path])


def test_where_no_gpu_is_asked_for_none_is_looked_for(monkeypatch):
    monkeypatch.setattr(host, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(gpus, "find_gpus", lambda _: pytest.fail("GPUs were looked for"))
    for device in ("cpu", "emulated:1GiB,1"):
        assert host_resources(device).accelerator is None


def test_each_gpu_is_tried(monkeypatch):
    def ones(*_, device):
        if device == "cuda:2":
            raise torch.AcceleratorError("CUDA error: no kernel image is available\nCompile with ...")
        return torch.zeros(2)

    cuda = SimpleNamespace(
        device_count=lambda: 3,
        mem_get_info=lambda name: {"cuda:0": (3, 9), "cuda:1": (5, 9)}[name],
        get_device_capability=lambda name: (7, 5) if str(name) == "cuda:0" else (9, 0),
        get_device_name=lambda _: "a GPU",
    )
    fake = SimpleNamespace(
        ones=ones, cuda=cuda, version=SimpleNamespace(hip=None), device=torch.device, __version__="2"
    )
    monkeypatch.setattr(gpus, "torch", fake)
    *usable, broken = tried_gpus().gpus
    assert len({gpu.identity for gpu in usable}) == 2
    assert [msgspec.structs.replace(gpu, identity="") for gpu in usable] == FOUND[:2]
    assert broken == Gpu("cuda:2", problem="CUDA error: no kernel image is available")


def no_gpus(monkeypatch, **attributes):
    cuda = SimpleNamespace(device_count=lambda: 0, **attributes)
    monkeypatch.setattr(gpus, "torch", SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=None, cuda="13.0")))


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            "The NVIDIA driver on your system is too old (found version 11040).\nMore",
            r"too old .*11040\)\.; if `nvidia-smi` fails",
        ),
        ("No CUDA GPUs are available", "^$"),
    ],
)
def test_why_torch_finds_no_gpu(monkeypatch, error, why):
    def init():
        raise RuntimeError(error)

    no_gpus(monkeypatch, init=init)
    found = tried_gpus()
    assert found.gpus == []
    assert re.search(why, found.problem)


def test_a_build_of_torch_for_cpus_is_named():
    if torch.version.cuda or torch.version.hip:
        pytest.skip("torch is built for GPUs")
    assert "build for CPUs; for an NVIDIA GPU, pip uninstall -y torch && pip install" in tried_gpus().problem


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            ChildProcessError("its process ended by SIGSEGV"),
            "failed: its process ended by SIGSEGV; if `nvidia-smi` fails",
        ),
        (TimeoutError("its process took longer than 9 seconds"), "longer than 9 seconds; if `nvidia-smi` fails"),
        (None, "failed: JSON is malformed"),
    ],
)
def test_a_process_that_fails_is_told_with_its_cause(monkeypatch, tmp_path, error, cause):
    def run(*_, timeout_s, first=()):
        assert timeout_s > 60
        yield from first
        if error is not None:
            raise error
        yield b"no JSON\n"

    monkeypatch.setattr(gpus, "run_apart", run)
    assert find_gpus(tmp_path).gpus == []
    assert cause in find_gpus(tmp_path).problem

    first = GpuSearch([Gpu("cuda:0", free_bytes=3, kernels_problem="not tried"), Gpu("cuda:1", problem="broken")])
    monkeypatch.setattr(gpus, "run_apart", partial(run, first=[msgspec.json.encode(first)]))
    tried, broken = find_gpus(tmp_path).gpus
    assert (tried.name, tried.free_bytes, broken) == ("cuda:0", 3, first.gpus[1])
    assert cause.partition("failed: ")[2] in tried.kernels_problem


@pytest.fixture
def card(monkeypatch):
    """A GPU with kernels that work or fail, and versions that may change."""
    found = SimpleNamespace(problem="", num_trials=0)

    def why_not(device):
        found.num_trials += 1
        return found.problem

    cuda = SimpleNamespace(
        device_count=lambda: 1,
        mem_get_info=lambda _: (3, 9),
        get_device_name=lambda _: "H100",
        get_device_capability=lambda _: (9, 0),
    )
    fake = SimpleNamespace(
        cuda=cuda,
        ones=lambda *_, device: torch.zeros(2),
        device=torch.device,
        version=SimpleNamespace(hip=None),
        __version__="2",
    )
    monkeypatch.setattr(gpus.launching, "why_not", why_not)
    monkeypatch.setattr(gpus, "torch", fake)
    return found


def tried(folder):
    """Return the only GPU, once its kernels were tried."""
    (gpu,) = tried_gpus().gpus
    return with_kernels(gpu, folder)


def test_kernels_that_run_are_tried_once(card, tmp_path):
    for _ in range(3):
        assert tried(tmp_path) == tried_gpus().gpus[0]
    assert card.num_trials == 1


def test_kernels_are_tried_again_after_a_failure_or_a_change(card, tmp_path, monkeypatch):
    card.problem = NO_COMPILER
    for _ in range(2):
        assert tried(tmp_path).kernels_problem == NO_COMPILER
    assert card.num_trials == 2
    card.problem = ""
    driver = tmp_path / "version"
    monkeypatch.setattr(gpus, "_DRIVER", driver)
    for number, text in enumerate(("580", "580", "590", "580"), 1):
        driver.write_text(text)
        assert tried(tmp_path).kernels_problem == ""
        assert card.num_trials == 2 + (1, 1, 2, 2)[number - 1]
    monkeypatch.setattr(gpus, "version", lambda _: "9.9")
    tried(tmp_path)
    assert card.num_trials == 5
    tried(tmp_path / "version" / "no folder")
    assert card.num_trials == 6


def test_a_gpu_that_cannot_compute_is_not_tried(card, tmp_path):
    assert with_kernels(Gpu("cuda:0", problem="broken"), tmp_path) == Gpu("cuda:0", problem="broken")
    assert card.num_trials == 0


@pytest.mark.slow  # starts a process
@pytest.mark.parametrize("fails", [False, True])
def test_compilers_and_drivers_do_not_disturb_the_answer(tmp_path, fails):
    code = (
        "import os\n"
        "from moeflow.planner.hardware import gpus\n"
        "def noisy(gpu, folder):\n"
        "    os.system('echo noise; echo noise >&2'); print('noise')\n"
        f"    if {fails}: raise OSError('no context')\n"
        "    return gpu\n"
        "gpus.with_kernels = noisy\n"
        "gpus.tried_gpus = lambda: gpus.GpuSearch([gpus.Gpu('cuda:0', free_bytes=7)])\n"
        "gpus.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, input=str(tmp_path))
    first, last = (msgspec.json.decode(line, type=GpuSearch) for line in done.stdout.splitlines())
    assert first.gpus == [Gpu("cuda:0", free_bytes=7, kernels_problem="the process that tried them ended early")]
    if fails:
        assert "looking for a GPU failed: no context; if `nvidia-smi` fails" in last.problem
    else:
        assert last == GpuSearch([Gpu("cuda:0", free_bytes=7)])
    assert done.stderr == ""


@pytest.mark.slow  # starts processes
def test_the_process_that_asks_does_not_even_import_torch():
    code = (
        "import sys\n"
        "from moeflow.planner.hardware import host\n"
        "host.has_gpu_driver = lambda: True\n"
        "print(host.host_resources('auto').accelerator, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = "cuda" if torch.cuda.is_available() else "None"
    assert done.stdout.startswith(expected)
    assert done.stdout.endswith("False\n")
