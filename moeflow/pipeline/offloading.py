"""Common parts of pipelines with a model larger than the device: lanes, transfers of weights, attention on the host.

A layer's weights reach the device in pages, each through pinned memory: two pages are pinned at a time. The device
holds two layers, so the weights of layer i + 2 wait for the end of layer i. Page 0 begins with the weights of
pre-attention. Transfers in one direction go one after another. Source: MoE-Lightning 4.1 and A.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from moeflow.pipeline.priority import DEMAND, PREFETCH
from moeflow.pipeline.task import Task, TaskMaker

HOST = "host"  # the lane of the host's processor
HOST_TO_DEVICE = "host_to_device"
DEVICE_TO_HOST = "device_to_host"
HOST_TO_PINNED = "host_to_pinned"
BETWEEN_DEVICES = "between_devices"  # sums of several devices that share each layer

NUM_WINDOWS: Final = 2  # blocks of keys and values on their way to the device, of one micro-batch each

OP_LANES: Final = {  # of all ops except the device's own
    "cpu_attention": HOST,
    "host_experts": HOST,
    "save_kv": HOST,
    "weights_to_pinned": HOST_TO_PINNED,
    "kv_to_pinned": HOST_TO_PINNED,
    "weights_to_device": HOST_TO_DEVICE,
    "load_hidden": HOST_TO_DEVICE,
    "load_kv": HOST_TO_DEVICE,
    "load_sums": HOST_TO_DEVICE,
    "offload_qkv": DEVICE_TO_HOST,
    "offload_routed": DEVICE_TO_HOST,
    "store_kv": DEVICE_TO_HOST,
    "sum_attention": BETWEEN_DEVICES,
    "sum_network": BETWEEN_DEVICES,
}


class LayerWeights:
    """Makes the transfers of a pass's weights; a page of None is a whole layer.

    A warm pass finds layer 0 on the device, and one that wraps ends by loading it again, for the pass that follows.
    """

    def __init__(
        self, make: TaskMaker, num_layers: int, num_pages: int | None = None, *, is_warm: bool, wraps: bool
    ) -> None:
        self._make = make
        self._num_layers = num_layers
        self._pages = [None] if num_pages is None else list(range(num_pages))
        self._priority = DEMAND if num_pages is None else PREFETCH  # a page lets small transfers pass
        self._first = 1 if is_warm else 0
        self._end = num_layers + wraps
        self._pinned: dict[tuple[int, int | None], Task] = {}
        self._moved: list[Task] = []  # all pages that go to the device, in order
        self._arrived: dict[int, list[Task]] = {}  # pages by layer; layer `num_layers` is layer 0 of the next pass
        self._last_uses: dict[int, Task] = {}

    def to_pinned(self, layer: int, page: int | None) -> Iterator[Task]:
        """Yield the transfer, if the pass loads that layer and has not yet transferred the page."""
        if not self._first <= layer < self._end or (layer, page) in self._pinned:
            return
        number = len(self._pinned)
        slot = self._moved[number - 2] if number >= 2 else None
        task = self._make("weights_to_pinned", layer % self._num_layers, page, after=[slot])
        self._pinned[layer, page] = task
        yield task

    def to_device(self, layer: int, page: int | None, behind: Task | None = None) -> Iterator[Task]:
        """Yield the transfer, if the pass loads that layer; pages must come in order.

        It goes after the smaller transfer that it is `behind`.
        """
        if not self._first <= layer < self._end:
            return
        yield from self.to_pinned(layer, page)
        pages = self._arrived.setdefault(layer, [])
        freed = None if pages else self._last_uses.get(layer - 2)
        after = [self._pinned[layer, page], *self._moved[-1:], freed, behind]
        place = layer % self._num_layers
        task = self._make("weights_to_device", place, page, after=after, priority=self._priority)
        self._moved.append(task)
        pages.append(task)
        yield task

    def load(self, layer: int) -> Iterator[Task]:
        """Yield both transfers of all pages, each as early as possible."""
        for page in self._pages:
            yield from self.to_device(layer, page)

    def first_page(self, layer: int) -> Task | None:
        """Return the transfer that pre-attention waits for; None: the page is on the device."""
        pages = self._arrived.get(layer)
        return pages[0] if pages else None

    def last_page(self, layer: int) -> Task | None:
        """Return the last transfer, which post-attention waits for; None: the layer is on the device."""
        pages = self._arrived.get(layer)
        return pages[-1] if pages else None

    def used_up(self, layer: int, by: Task) -> None:
        """Record a task that uses a layer; the last recorded one comes after all others."""
        self._last_uses[layer] = by


def store_kv(make: TaskMaker, layer: int, micro_batch: int, projected: Task) -> list[Task]:
    """Return the transfer of new keys and values to the host, and their storage there."""
    stored = make("store_kv", layer, micro_batch, after=[projected])
    return [stored, make("save_kv", layer, micro_batch, after=[stored])]


def attention_on_host(make: TaskMaker, layer: int, micro_batch: int, after: Iterable[Task | None]) -> list[Task]:
    """Return pre-attention, the transfer of queries, keys and values to the host, and attention there."""
    projected = make("pre_attention", layer, micro_batch, after=after)
    offloaded = make("offload_qkv", layer, micro_batch, after=[projected])
    return [projected, offloaded, make("cpu_attention", layer, micro_batch, after=[offloaded])]
