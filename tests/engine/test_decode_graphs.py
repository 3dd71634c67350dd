"""CUDA graphs are captured on the GPU of their model, on one stream, and only of what the GPU has kernels for."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from moeflow.core.batch import NO_SLOT, StateUse
from moeflow.engine.decode_graphs import SIZES, GraphForward, GraphRecorder, can_capture
from moeflow.kernels.triton import launching
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.pass_input import PassInput
from tests.shapes import ENGINE


def test_all_passes_are_captured_on_one_stream_of_the_models_gpu(monkeypatch):
    devices, streams, captured = [torch.device("cuda:0")], [], []

    @contextmanager
    def on(device):
        devices.append(device)
        yield
        devices.pop()

    @contextmanager
    def in_stream(stream):
        streams.append(stream)
        yield
        streams.pop()

    @contextmanager
    def graph(graph, *, pool, stream, capture_error_mode):
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        with in_stream(stream):
            yield

    def new_stream(device=None):
        return SimpleNamespace(device=device or devices[-1], wait_stream=lambda _: None)

    for name, fake in {
        "device": on,
        "stream": in_stream,
        "graph": graph,
        "Stream": new_stream,
        "current_stream": new_stream,
        "CUDAGraph": SimpleNamespace,
        "graph_pool_handle": lambda: "pool",
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake, raising=False)
    recorder = GraphRecorder(torch.device("cuda:1"))
    for _ in range(2):
        recorder.capture(lambda: captured.append((devices[-1], streams[-1])))

    assert {str(device) for device, _ in captured} == {"cuda:1"}
    assert {id(stream) for _, stream in captured} == {id(captured[0][1])}
    assert str(captured[0][1].device) == "cuda:1"


@pytest.mark.parametrize(
    ("capability", "head_dim", "latent_dim", "is_captured"),
    [(75, 128, 0, True), (75, 576, 512, False), (75, 512, 0, False), (80, 576, 512, True), (90, 576, 512, True)],
)
def test_attention_without_a_kernel_is_not_captured(monkeypatch, capability, head_dim, latent_dim, is_captured):
    monkeypatch.setattr(launching, "accepts", lambda _: True)
    monkeypatch.setattr(launching, "gpu_of", lambda _: launching.GPU(capability, 40))
    heads = SimpleNamespace(head_dim=head_dim)
    attention = SimpleNamespace(heads=heads, other_heads={}, latent=latent_dim or None, latent_dim=latent_dim)
    model = CausalLM.__new__(CausalLM)
    model.config = SimpleNamespace(attention=attention)
    model.norm = SimpleNamespace(weight=None)

    assert can_capture(model, ENGINE) == is_captured


@pytest.mark.parametrize(
    ("second", "size"), [(StateUse(source=7, target=2), None), (StateUse(1, 2), 2), (StateUse(NO_SLOT, 2), 2)]
)
def test_a_state_of_the_same_pass_is_not_read_by_a_graph(second, size):
    forward = GraphForward.__new__(GraphForward)
    forward._sizes, forward._passes = SIZES, dict.fromkeys(SIZES)
    states = [StateUse(source=0, target=0, saves=((16, 7),)), second]

    assert forward._size_for(PassInput([3, 4], [15, 16], [1, 1], [(0,), (0, 1)], [[0, 1]], states=states)) == size
