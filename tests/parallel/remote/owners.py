"""Experts that a test's process owns, and services over them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.parallel.remote.expert_service import ExpertService
from moeflow.parallel.remote.work_client import WorkClient
from tests.parallel.links import two_ends

NUM_EXPERTS, HIDDEN, WIDTH, TOP_K = 6, 32, 16, 3


def packed_layer(seed: int, weight_format="bfloat16") -> PackedExperts:
    chance = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(NUM_EXPERTS, 2 * WIDTH, HIDDEN, generator=chance)
    return PackedExperts.pack(gate_up, torch.randn(NUM_EXPERTS, HIDDEN, WIDTH, generator=chance), weight_format)


class Owner:
    """Some experts of each of these layers."""

    def __init__(self, layers: list[PackedExperts], held=range(NUM_EXPERTS)) -> None:
        self.hidden, self.num_layers, self.num_experts = HIDDEN, len(layers), NUM_EXPERTS
        self._layers, self._slots = layers, {expert: expert for expert in held}

    @contextlib.contextmanager
    def held(self, layer: int):
        yield self._layers[layer], self._slots


@contextlib.contextmanager
def client_of(service: ExpertService, owner: Owner, **more) -> Iterator[WorkClient]:
    with two_ends() as (ours, theirs):
        served = service.serve(theirs, owner)
        client = WorkClient(ours, HIDDEN, NUM_EXPERTS, **more)
        yield client
        client.close()
        served.close("the test is over")


def routed(chance: torch.Generator, num_tokens: int):
    """Return hidden states, and what a router may choose for them."""
    ids = torch.stack([torch.randperm(NUM_EXPERTS, generator=chance)[:TOP_K] for _ in range(num_tokens)])
    return torch.randn(num_tokens, HIDDEN, generator=chance), ids, torch.rand(num_tokens, TOP_K, generator=chance)
