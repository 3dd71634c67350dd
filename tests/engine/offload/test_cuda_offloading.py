"""Every pipeline with streams and events, like on a GPU: no forbidden overlap, and few waits."""

from __future__ import annotations

import threading

import pytest
import torch

from moeflow.engine.engine import Engine
from moeflow.engine.offload import host_split, offloaded_model
from moeflow.engine.offload.host_split import HostExpertSplit
from moeflow.pipeline.catalog import OFFLOADING
from moeflow.pipeline.devices.cuda_device import CudaDevice
from tests.engine.offload.offloaded_runs import LENGTHS, answers, offloaded, run, sharing
from tests.marks import thorough_unless
from tests.pipeline.devices.fake_cuda import WatchedDevice
from tests.tiny_mixtral import write_tiny_mixtral

DEVICE = "emulated:16MiB,1000,torch"
SHORT = LENGTHS[:5]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, num_local_experts=5, num_hidden_layers=3)
    return str(folder)


@pytest.fixture
def device(monkeypatch):
    device = WatchedDevice()
    monkeypatch.setattr(offloaded_model, "make_device", lambda config: device)
    return device


@pytest.fixture(
    params=["weights are pinned", pytest.param("weights are staged", marks=pytest.mark.thorough)], autouse=True
)
def _pinning(request, monkeypatch):
    if request.param == "weights are staged":
        stage_weights(monkeypatch)


def stage_weights(monkeypatch):
    monkeypatch.setattr(CudaDevice, "pin", lambda *_: False)


def overrides(model, pipeline, micro_batch=3, share=0.4):
    return offloaded(model, pipeline, micro_batch, share, DEVICE, dtype="bfloat16", max_num_batched_tokens=48)


@pytest.mark.parametrize(
    ("pipeline", "micro_batch", "share"),
    thorough_unless(
        lambda pipeline, micro_batch, _: micro_batch == 3 or pipeline == "cgopipe",
        ((pipeline, *cut) for pipeline in OFFLOADING for cut in ((3, 0.4), (1, 0.0), (1000, 1.0))),
    ),
)
def test_nothing_races_and_tokens_are_the_same(model, device, monkeypatch, pipeline, micro_batch, share):
    config = overrides(model, pipeline, micro_batch, share)
    tokens = run(config, SHORT)
    assert not device.cuda.races
    waiting = "a thread" if pipeline == "sequential" else "up"
    assert any(entry[:2] == (waiting, "waits for") for entry in device.cuda.log)
    assert device.cuda.launchers == {f"thread {threading.get_ident()}"}
    monkeypatch.undo()
    assert run(config, SHORT) == tokens


def test_nothing_races_where_weights_are_staged(model, device, monkeypatch):
    expected = run(overrides(model, "cgopipe"), SHORT)
    stage_weights(monkeypatch)
    assert run(overrides(model, "cgopipe"), SHORT) == expected
    assert not device.cuda.races


@pytest.mark.parametrize(("micro_batch", "share"), [(3, 0.4), (1, 0.0), (1000, 0.0)])
def test_nothing_races_where_the_host_computes_experts(model, device, micro_batch, share):
    run(sharing(overrides(model, "cgopipe", micro_batch, share), 2), SHORT)
    assert not device.cuda.races


def test_the_thread_that_launches_waits_between_passes_only(model, device):
    """All waits within a pass are those of streams, and of the host's lanes in their threads."""
    run(overrides(model, "cgopipe"), SHORT)
    here = f"thread {threading.get_ident()}"
    assert not [entry for entry in device.cuda.waits if entry[0] == here and entry[1] != "everything"]
    assert [entry for entry in device.cuda.waits if entry[0] != here]


def test_pages_wait_for_room_and_for_nothing_else(model, device):
    run(overrides(model, "cgopipe", micro_batch=1, share=0.0), SHORT, 20)
    log = device.cuda.log
    num_pages = sum(entry[:2] == ("up", "records") for entry in log)
    assert 0 < sum(entry[:2] == ("up", "waits for") for entry in log) < num_pages / 5
    assert not any(entry[0] == "down" and "up" in entry[2] for entry in log)


def test_rows_that_were_selected_elsewhere_are_waited_for(model, device):
    engine = Engine.load(overrides(model, "cgopipe"))
    try:
        device.cuda.log.clear()
        with torch.inference_mode():
            engine._runner._model.logits(torch.zeros(2, 32, dtype=torch.bfloat16))
        assert device.cuda.log[0] == ("a thread", "waits for", "everything")
    finally:
        engine.close()


class Hasty(WatchedDevice):
    """Forgets what a task comes after."""

    def ordered(self, task, after):
        self._ends.clear()
        return super().ordered(task, after)


@pytest.mark.parametrize(("pipeline", "num_hosted"), [*((name, 0) for name in OFFLOADING), ("cgopipe", 2)])
def test_streams_that_do_not_wait_race(model, monkeypatch, pipeline, num_hosted):
    device = Hasty()
    monkeypatch.setattr(offloaded_model, "make_device", lambda config: device)
    engine = Engine.load(sharing(overrides(model, pipeline), num_hosted))
    try:
        _, errors = answers(engine, SHORT)
    finally:
        engine.close()
    assert errors
    assert device.cuda.races


def test_the_device_times_the_link_and_waiting_for_it_is_no_work_of_the_host(model, device, monkeypatch):
    """A thread that only launches copies sees none of their time, and one that attends waits for its queries."""
    clock, uploads, attended = threading.local(), [], []

    def wait():
        clock.now = getattr(clock, "now", 0.0) + 1.0

    monkeypatch.setattr(host_split, "perf_counter", lambda: getattr(clock, "now", 0.0))
    monkeypatch.setattr(HostExpertSplit, "uploaded", lambda _, *given: uploads.append(given))
    monkeypatch.setattr(HostExpertSplit, "attended", lambda _, *given: attended.append(given))
    device.cuda.on_wait, device.cuda.copy_ms = wait, 4.0
    run(overrides(model, "cgopipe"), SHORT)
    assert {seconds for _, seconds in uploads} == {0.004}
    assert sum(num_bytes for num_bytes, _ in uploads) > 0
    assert attended
    assert {seconds for _, seconds in attended} == {0.0}
