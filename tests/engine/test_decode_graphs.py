"""CUDA graphs are captured on the GPU of their model, on one stream."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch

from moeflow.engine.decode_graphs import GraphRecorder


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
