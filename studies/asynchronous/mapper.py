"""Which device a batch runs on, and which one computes each of its tokens' experts.

A mapper decides both before the batch begins, from where experts have homes and from what it has mapped so far. Three
stand here; any class with the two methods is another. Source: ExpertFlow 3.2 and 3.5.2 (the mapper of its runtime).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from moeflow.parallel.placement.placement import ExpertIds, ExpertPlacement, ServingTable


class Mapper(Protocol):
    """Decides where work goes. Called for each batch in order, and for each of its layers in order."""

    def home(self, batch: int, num_tokens: int) -> int:
        """Return the device that runs a batch's attention and routers."""
        ...

    def owners(self, layer: int, home: int, topk_ids: ExpertIds) -> ExpertIds:
        """Return the device of each pair of a token and an expert. Shapes: topk_ids [T, K] -> [T, K]."""
        ...


class RoundRobinMapper(Mapper):
    """Assign batches round-robin to devices, and likewise the tokens of an expert with several homes."""

    def __init__(self, placement: ExpertPlacement) -> None:
        self._num_devices = placement.num_ranks
        self._tables = [ServingTable(homes) for homes in placement.homes]

    def home(self, batch: int, num_tokens: int) -> int:
        """See `Mapper`."""
        return batch % self._num_devices

    def owners(self, layer: int, home: int, topk_ids: ExpertIds) -> ExpertIds:
        """See `Mapper`."""
        return self._tables[layer].ranks(topk_ids)


class LeastLoadedMapper(Mapper):
    """Batches go to the device with the fewest tokens; those of an expert, to where most room is among its homes."""

    def __init__(self, placement: ExpertPlacement) -> None:
        self._homes = placement.homes
        self._num_tokens = np.zeros(placement.num_ranks, int)
        self._num_pairs = np.zeros((len(placement.homes), placement.num_ranks), int)

    def home(self, batch: int, num_tokens: int) -> int:
        """See `Mapper`."""
        device = int(self._num_tokens.argmin())
        self._num_tokens[device] += num_tokens
        return device

    def owners(self, layer: int, home: int, topk_ids: ExpertIds) -> ExpertIds:
        """See `Mapper`. Experts with one home go first, so that the others fill what these leave."""
        owners = np.empty(topk_ids.shape, int)
        loads = self._num_pairs[layer]
        homes = self._homes[layer]
        for expert in sorted(np.unique(topk_ids).tolist(), key=lambda expert: len(homes[expert])):
            is_expert = topk_ids == expert
            among = np.array(homes[expert])
            shares = fill(loads[among], int(is_expert.sum()))
            owners[is_expert] = np.repeat(among, shares)
            loads[among] += shares
        return owners


class LayerMapper:
    """All experts of a layer are on one device, those of the next layer on the next, so that batches go round.

    With more batches in flight than devices, whose tasks begin as their inputs are there, devices then work on
    different layers at the same time: a pipeline without a scheduler. (With blocks of layers there is none:
    batches catch up with each other before a device whose own next layer is as late as theirs.) Source: ExpertFlow 3.3.
    """

    def __init__(self, num_devices: int) -> None:
        self._num_devices = num_devices

    def home(self, batch: int, num_tokens: int) -> int:
        """See `Mapper`: devices take turns."""
        return batch % self._num_devices

    def owners(self, layer: int, home: int, topk_ids: ExpertIds) -> ExpertIds:
        """See `Mapper`."""
        return np.full(topk_ids.shape, layer % self._num_devices)


def fill(loads: ExpertIds, number: int) -> ExpertIds:
    """Return how many of a number of things each place gets so that the fullest is as empty as can be: [N] -> [N]."""
    order = np.argsort(loads, kind="stable")
    ascending = loads[order].astype(np.int64)
    places = np.arange(1, len(loads) + 1)
    needed = ascending * places - np.cumsum(ascending)  # to lift all before each place to its level
    used = int(np.searchsorted(needed, number, side="right"))  # places that get some
    level, rest = divmod(number + int(ascending[:used].sum()), used)
    shares = np.zeros(len(loads), np.int64)
    shares[order[:used]] = level - ascending[:used] + (np.arange(used) < rest)
    return shares
