"""Buffers between main memory and a GPU, without a GPU: which copies may overlap, and that none is overtaken."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moeflow.core.errors import CapacityError
from moeflow.core.units import MIB
from moeflow.pipeline.devices import staging
from moeflow.pipeline.devices.staging import Staging
from tests.pipeline.devices.fake_cuda import Event, FakeCuda, Race, Watching

BUFFER_BYTES = 96
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setattr(staging, "BUFFER_BYTES", BUFFER_BYTES)
    monkeypatch.setattr(staging, "NUM_BUFFERS", 2)


class Card:
    """A GPU in main memory that notes all accesses, and the buffers that were allocated for it."""

    def __init__(self) -> None:
        self.cuda = FakeCuda()
        self.buffers: list[torch.Tensor] = []
        self.staging = Staging(CPU, self._allocate, self.cuda)

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        self.buffers.append(torch.zeros(num_bytes, dtype=torch.uint8))
        self.cuda.watch(self.buffers[-1], is_on_device=False)
        return self.buffers[-1]

    def memory(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        found = torch.full(shape, -1.0, dtype=dtype)
        self.cuda.watch(found, is_on_device=True)
        return found

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with Watching(self.cuda):
            self.staging.copy(target, source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(0, 3), (1,), (24,), (25,), (7, 11), (3, 5, 9)])
def test_numbers_arrive_in_the_targets_type(shape, dtype):
    card, source = Card(), torch.randn(shape)
    target = card.memory(*shape, dtype=dtype)
    with card.staging.copying():
        card.copy(target, source)
    assert torch.equal(target, source.to(dtype))
    assert sum(map(len, card.buffers)) == 2 * BUFFER_BYTES


def test_rows_that_lie_apart_arrive():
    card, source = Card(), torch.randn(4, 30)
    whole = card.memory(4, 50)
    with card.staging.copying():
        card.copy(whole[:, 10:40], source)
    assert torch.equal(whole[:, 10:40], source)
    assert (whole[:, :10] == -1).all()
    assert (whole[:, 40:] == -1).all()


def test_threads_share_buffers_without_a_race():
    card = Card()
    sources = [torch.randn(40 + number) for number in range(30)]
    targets = [card.memory(*source.shape) for source in sources]
    with card.staging.copying(), ThreadPoolExecutor(5) as threads:
        list(threads.map(card.copy, targets, sources))
    assert all(map(torch.equal, targets, sources))
    assert card.cuda.races == []


def test_a_buffer_is_filled_again_only_after_its_copy(monkeypatch):
    """The check would find it: the same copies, without waiting for the ends of earlier ones, are a race."""
    card, source = Card(), torch.randn(100)
    target = card.memory(100)
    card.copy(target, source)
    assert card.cuda.races == []
    monkeypatch.setattr(Event, "synchronize", lambda _: None)
    with pytest.raises(Race, match="writes bytes 0 to 96"):
        card.copy(target, source)


def test_the_host_waits_for_a_buffer_and_not_for_a_copy():
    card, source = Card(), torch.randn(24)
    for _ in range(2):
        card.copy(card.memory(24), source)
    assert ("a thread", "waits for") not in {entry[:2] for entry in card.cuda.log}
    card.copy(card.memory(24), source)
    assert [entry[:2] for entry in card.cuda.log].count(("a thread", "waits for")) == 1


def test_copies_follow_earlier_work_and_arrive_before_later_work():
    card, target = Card(), None
    with Watching(card.cuda), card.cuda.stream(card.cuda.current_stream(CPU)):
        target = torch.zeros(24) + 1  # the memory's earlier use, on the GPU
    with card.staging.copying():
        card.copy(target, torch.ones(24))
    with Watching(card.cuda), card.cuda.stream(card.cuda.current_stream(CPU)):
        target.sum()
    assert card.cuda.races == []


def test_work_on_copied_numbers_follows_them():
    card, part = Card(), None
    packed = card.memory(24)
    with card.staging.copying(), Watching(card.cuda), card.staging.on_stream():
        part = torch.empty(24)
        card.staging.copy(part, torch.arange(24.0))
        packed.copy_(part * 2)
    assert packed.tolist() == [2.0 * number for number in range(24)]
    assert card.cuda.races == []


def test_an_error_gives_the_buffer_back():
    card = Card()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="size of tensor"):
            card.staging.copy(card.memory(24), torch.randn(23))
    copied = threading.Event()

    def copy() -> None:
        card.staging.copy(card.memory(24), torch.randn(24))
        copied.set()

    threading.Thread(target=copy, daemon=True).start()
    assert copied.wait(60)


def test_a_lack_of_memory_for_buffers_is_named(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(CapacityError, match=r"4\.0 MiB of main memory cannot be page-locked: free main memory"):
        staging.page_locked(4 * MIB)
