"""The comparison of pipelines, on a model that is mostly holes, with this machine as the device."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext

import pytest
import torch
from click.testing import CliRunner

from moeflow.checkpoint.open import open_checkpoint
from moeflow.engine.offload import offloaded_model
from moeflow.models.layers.allocation.tensors import SlabAllocator
from moeflow.planner.hardware.host import host_resources
from moeflow.planner.model_files import shipped_models
from moeflow.planner.resolve import resolve
from studies import pipelines
from studies.hollow_model import FILLED, write_hollow_mixtral
from tests.pipeline.devices.fake_cuda import WatchedDevice

SMALL = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 97}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hollow")
    config = json.loads(shipped_models()["mixtral-8x7b"].read_text())
    (folder / "shape.json").write_text(json.dumps({**config, **SMALL, "num_key_value_heads": 2}))
    write_hollow_mixtral(folder / "shape.json", folder / "model")
    return folder / "model"


def measured(folder, device, *more):
    sizes = ["--requests", "5", "--micro-batch", "3", "--steps", "2", "--rounds", "1", "--json"]
    done = CliRunner().invoke(pipelines.main, [str(folder), "--device", device, *sizes, *more])
    assert not done.exception, (done.output, done.exception)
    return [json.loads(line) for line in done.stdout.splitlines()]


def in_main_memory(config, memory):
    return SlabAllocator(getattr(torch, config.dtype), torch.device("cpu"), memory=memory)


def test_experts_are_holes_but_for_a_few_values(folder):
    checkpoint = open_checkpoint(folder)
    for name in checkpoint.tensors:
        weight = checkpoint.read(name).float().flatten()
        assert weight[:FILLED].abs().mean() > 0.01
        assert not (".experts." in name and weight[FILLED:].any())
    checkpoint.close()
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size > 3 * 8 * 3 * 64 * 48 * 2


@pytest.mark.thorough
@pytest.mark.parametrize("device", ["emulated:16MiB,1000", "emulated:16MiB,1000,torch"])
def test_all_pipelines_are_compared(folder, device):
    records = measured(folder, device)
    assert [record["pipeline"] for record in records] == list(pipelines.PIPELINES)
    assert all(len(record["tokens_per_s"]) == 1 for record in records)
    assert all(record["equal_tokens"] > (0.8 if "torch" in device else 0.999) for record in records)


@pytest.mark.slow
@pytest.mark.parametrize("launches", [False, True])
def test_cgopipe_copies_while_it_computes(folder, launches):
    """Link, device and host take as long; times are emulated, and long."""
    more = ["--streams"] if launches else []
    device = "emulated:480KiB,0.001,t4,torch"
    few = ["--pipeline", "cgopipe", "--pipeline", "fastdecode", "--requests", "12", "--steps", "1"]
    cgopipe, fastdecode = measured(folder, device, "--balance", "1", "--threads", "1", *few, *more)
    assert cgopipe["overlap"] > fastdecode["overlap"]
    assert cgopipe["link_idle"] < fastdecode["link_idle"]


@pytest.mark.thorough
def test_a_gpu_s_pipelines_come_one_after_the_other(folder, monkeypatch):
    """With a stand-in for a GPU: the configuration is a GPU's, the device is this machine."""
    devices = []

    def make_device(config):
        assert config.cuda is not None
        devices.append(WatchedDevice())
        return devices[-1]

    monkeypatch.setattr(offloaded_model, "make_device", make_device)
    machine = dataclasses.replace(host_resources(), accelerator="cuda", accelerator_free_bytes=2**33)
    monkeypatch.setattr(pipelines, "resolve", lambda settings: resolve(settings, resources=machine))
    monkeypatch.setattr(pipelines, "make_allocator", in_main_memory)
    monkeypatch.setattr(pipelines, "set_up", lambda _: None)
    monkeypatch.setattr(pipelines, "timed_devices", lambda has_streams: nullcontext())  # there are no events
    monkeypatch.setattr(pipelines.Runner, "_spans", ((), ()))
    records = measured(folder, "cuda:2GiB")
    assert [record["pipeline"] for record in records] == list(pipelines.PIPELINES)
    assert len(devices) == len(records)
    assert not any(device.cuda.races for device in devices)
