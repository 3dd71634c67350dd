"""CUDA graphs are captured on the GPU of their model, on one stream, and only of what the GPU has kernels for."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from moeflow.core.batch import NO_SLOT, StateUse
from moeflow.core.graph_sizes import SIZES, captured_sizes
from moeflow.engine.decode_graphs import GraphForward, GraphRecorder, can_capture
from moeflow.kernels.triton import launching
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.pass_input import PassInput
from tests.shapes import ENGINE


class FakeCuda:
    """Notes which device and stream are the current ones; a capture may fail, as torch's does."""

    def __init__(self, monkeypatch):
        self.current = (torch.device("cuda:0"), "default")
        self.fails = False
        self.num_streams = 0
        names = ("device", "stream", "graph", "Stream", "current_stream", "CUDAGraph", "graph_pool_handle")
        for name in names:
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def Stream(self, device):  # torch's name
        self.num_streams += 1
        return SimpleNamespace(name=f"{device} {self.num_streams}", wait_stream=lambda _: None)

    def CUDAGraph(self):
        return None

    def graph_pool_handle(self):
        return "pool"

    def current_stream(self, device):
        assert str(device) == "cuda:1"
        return SimpleNamespace(name="default", wait_stream=lambda _: None)

    @contextmanager
    def device(self, device):
        before, self.current = self.current, (device, self.current[1])
        yield
        self.current = (before[0], self.current[1])

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, (self.current[0], stream.name)
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph, *, pool, stream, capture_error_mode):
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        before, self.current = self.current, (self.current[0], stream.name)
        yield
        if self.fails:
            raise RuntimeError("capture failed")
        self.current = before


@pytest.mark.parametrize("fails", [False, True])
def test_all_passes_are_captured_on_one_stream_of_the_models_gpu(monkeypatch, fails):
    cuda, captured = FakeCuda(monkeypatch), []
    recorder = GraphRecorder(torch.device("cuda:1"))
    for _ in range(2):
        cuda.fails = fails
        with pytest.raises(RuntimeError) if fails else nullcontext():
            recorder.capture(lambda: captured.append(cuda.current))
        assert cuda.current[1] == "default"

    assert set(captured) == {(torch.device("cuda:1"), "cuda:1 1")}


class NotedGraph:
    """A graph that notes all calls, and replays the notes between its begin and its end."""

    def __init__(self, log):
        self._log = log

    def capture_begin(self, *arguments, **named):
        self._log.append(("begin", arguments, named))
        self._start = len(self._log)

    def capture_end(self):
        self._work = self._log[self._start :]
        self._log.append("end")

    def replay(self):
        self._log.extend(self._work)


class HostSteps:
    """Two layers, each with a step of the host between two kernels."""

    takes_graphs = True

    def __init__(self, log):
        self._log = log
        self._run = lambda step: step()

    @contextmanager
    def cut_by(self, cut):
        self._run = cut
        yield
        self._run = lambda step: step()

    def layers(self):
        for layer in range(2):
            self._log.append(f"kernel {layer}")
            self._run(lambda layer=layer: self._log.append(f"host {layer}"))
        self._log.append("head")
        return "hidden"


def test_a_pass_is_cut_at_each_step_of_the_host(monkeypatch):
    log = []
    cuda, steps = FakeCuda(monkeypatch), HostSteps(log)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: NotedGraph(log))

    @contextmanager
    def graph(cuda_graph, *, pool, stream, capture_error_mode):  # as torch's
        cuda_graph.capture_begin(pool, capture_error_mode=capture_error_mode)
        yield
        cuda_graph.capture_end()

    monkeypatch.setattr(torch.cuda, "graph", graph)
    whole = ["kernel 0", "host 0", "kernel 1", "host 1", "head"]
    captured, hidden = GraphRecorder(torch.device("cuda:1"), steps).capture(steps.layers)
    begin = ("begin", ("pool",), {"capture_error_mode": "thread_local"})
    assert log == [*whole * 2, begin, "kernel 0", "end", begin, "kernel 1", "end", begin, "head", "end"]
    assert hidden == "hidden"
    log.clear()
    captured.replay()
    assert log == whole  # the host's steps are run now, between the graphs
    assert cuda.current[1] == "default"
    log.clear()
    steps.layers()
    assert log == whole


def test_passes_that_are_not_for_graphs_run_as_they_come():
    forward = GraphForward.__new__(GraphForward)
    forward._sizes, forward._passes = SIZES, dict.fromkeys(SIZES)
    for takes_graphs, size in ((True, 2), (False, None)):
        forward._steps = SimpleNamespace(takes_graphs=takes_graphs)
        assert forward._size_for(PassInput([3, 4], [15, 16], [1, 1], [(0,), (0, 1)], [[0, 1]])) == size


def model_of(head_dim=128, latent_dim=0, embed_positions=None):
    heads = SimpleNamespace(head_dim=head_dim)
    attention = SimpleNamespace(heads=heads, other_heads={}, latent=latent_dim or None, latent_dim=latent_dim)
    model = CausalLM.__new__(CausalLM)
    model.config = SimpleNamespace(attention=attention)
    model.norm, model.embed_positions = SimpleNamespace(weight=None), embed_positions
    return model


@pytest.fixture
def on_gpu(monkeypatch):
    """Return a function that sets the compute capability of the GPU that has all models."""
    monkeypatch.setattr(launching, "accepts", lambda _: True)
    return lambda capability: monkeypatch.setattr(launching, "gpu_of", lambda _: launching.GPU(capability, 40))


@pytest.mark.parametrize(
    ("capability", "head_dim", "latent_dim", "is_captured"),
    [(75, 128, 0, True), (75, 576, 512, False), (75, 512, 0, False), (80, 576, 512, True), (90, 576, 512, True)],
)
def test_attention_without_a_kernel_is_not_captured(on_gpu, capability, head_dim, latent_dim, is_captured):
    on_gpu(capability)
    assert can_capture(model_of(head_dim, latent_dim), ENGINE) == is_captured


@pytest.mark.parametrize(("weight", "is_captured"), [(torch.zeros(1), True), (None, False)])
def test_positions_that_the_host_computes_are_not_captured(on_gpu, weight, is_captured):
    on_gpu(90)
    assert can_capture(model_of(embed_positions=SimpleNamespace(weight=weight)), ENGINE) == is_captured


class Recorder:
    """Captures passes that are small enough; larger ones fail with an error of their own, or with its consequence."""

    def __init__(self, most, message, *, ends_badly):
        self.most, self.message, self.ends_badly, self.sizes = most, message, ends_badly, []

    def capture(self, run):
        size = run()
        self.sizes.append(size)
        if size > self.most:
            try:
                raise torch.OutOfMemoryError(self.message)
            finally:
                if self.ends_badly:
                    raise RuntimeError("operation failed due to a previous error during capture")
        return SimpleNamespace(replay=None), size


@pytest.mark.parametrize("ends_badly", [False, True])
@pytest.mark.parametrize(
    ("most", "message", "captured", "warning"),
    [
        (64, "", (1, 2, 4, 8, 16, 24, 32), ""),
        (16, "CUDA out of memory", (1, 2, 4, 8, 16), "decode passes of more than 16 requests run without CUDA graphs"),
        (0, "CUDA out of memory", (), "decode passes run without CUDA graphs"),
        (16, "illegal access", (), "decode passes run without CUDA graphs"),
    ],
)
def test_sizes_without_memory_are_left_out(monkeypatch, caplog, most, message, captured, warning, ends_badly):
    forward = GraphForward.__new__(GraphForward)
    forward._sizes, forward._passes, forward._steps = captured_sizes(30), {}, None
    forward._model = SimpleNamespace(moe_blocks=lambda: ())
    forward._recorder = Recorder(most, message, ends_badly=ends_badly)
    monkeypatch.setattr(forward, "_write_inputs", lambda *_: None, raising=False)
    monkeypatch.setattr(forward, "_run_static", lambda size, choices: size, raising=False)

    forward._capture_all()

    assert tuple(sorted(forward._passes)) == captured
    assert [record.getMessage().startswith(warning) for record in caplog.records] == ([True] if warning else [])
    least = 1 if "illegal" not in message else 32
    assert forward._recorder.sizes == [size for size in reversed(captured_sizes(30)) if size >= least]
    given = PassInput([3] * 20, [15] * 20, [1] * 20, [(0,)] * 20, [list(range(20))])
    assert forward._size_for(given) == (24 if 24 in captured else None)


@pytest.mark.parametrize(
    ("second", "size"), [(StateUse(source=7, target=2), None), (StateUse(1, 2), 2), (StateUse(NO_SLOT, 2), 2)]
)
def test_a_state_of_the_same_pass_is_not_read_by_a_graph(second, size):
    forward = GraphForward.__new__(GraphForward)
    forward._sizes, forward._passes, forward._steps = SIZES, dict.fromkeys(SIZES), None
    states = [StateUse(source=0, target=0, saves=((16, 7),)), second]

    assert forward._size_for(PassInput([3, 4], [15, 16], [1, 1], [(0,), (0, 1)], [[0, 1]], states=states)) == size
