"""A pass through layers whose experts have slots: where it stops, and that its bits do not depend on stops."""

from __future__ import annotations

import dataclasses
import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.attention.heads import Heads
from moeflow.kernels.attention.kv_blocks import KVBlocks, kv_block_bytes
from moeflow.kernels.attention.scores import PLAIN
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.decoder import NOTHING, Expected, PackedDecoder
from moeflow.kernels.cpu.expert_slots import SlotExperts, add_pairs
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.cpu.packed_layer import PackedAttention, PackedLayer
from moeflow.kernels.cpu.packed_weight import PackedWeight
from moeflow.kernels.cpu.stages import MoEStage
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.lazy_memory import allocate_lazily
from moeflow.kernels.norm import NormWeights, normalise
from moeflow.kernels.rotary import Rotary
from moeflow.kernels.routing import Routing
from moeflow.kernels.weight_format import MADE_FORMATS

HIDDEN, WIDTH, DIM, EXPERTS, LAYERS = 48, 33, 16, 5, 4
ABSENT, LOADING = -1, -2


def pack(rows, cols, weight_format):
    return PackedWeight.pack(torch.randn(rows, cols) / cols**0.5, weight_format)


class Model:
    """Layers of experts, the second dense, once in order and once in slots shared by all layers."""

    def __init__(self, weight_format, top_k=2, *, has_layer_norms=False):
        torch.manual_seed(0)
        self.top_k = top_k
        slots = PackedExperts(3 * EXPERTS + 2, HIDDEN, WIDTH, weight_format)
        places = torch.randperm(slots.num_experts)[: 3 * EXPERTS].to(torch.int32).view(3, EXPERTS)
        self.table = places.clone()
        resident, cached = [], []
        self.biases = []  # of layers with routers
        for number in range(LAYERS):
            heads = Heads(2, 1, DIM, eps=1e-6)
            norms = [self._norm(has_layer_norms), self._norm(has_layer_norms)]
            common = ((pack(4 * DIM, HIDDEN, weight_format),), None, norms[0], PackedAttention(heads, PLAIN, 0))
            is_dense = number == 1
            gate_up = torch.randn(1 if is_dense else EXPERTS, 2 * WIDTH, HIDDEN) / 7
            biases = (
                ExpertBiases(torch.randn(EXPERTS, 2 * WIDTH), torch.randn(EXPERTS, HIDDEN)) if number == 2 else None
            )
            down = torch.randn(len(gate_up), HIDDEN, WIDTH) / 6
            experts = PackedExperts.pack(gate_up, down, weight_format, biases=biases)
            router = None if is_dense else pack(EXPERTS, HIDDEN, "float32")
            choose = Routing(1 if is_dense else top_k, renormalize=True)
            stage = (pack(HIDDEN, 2 * DIM, weight_format), None, norms[1], router, choose)
            resident.append(PackedLayer(*common, MoEStage(*stage, experts)))
            if is_dense:
                cached.append(resident[-1])
                continue
            row = len([layer for layer in cached if layer.stage.router is not None])
            for expert, slot in enumerate(places[row].tolist()):
                slots.storage[slot].copy_(experts.storage[expert])
            cached.append(PackedLayer(*common, MoEStage(*stage, slots, self.table[row], biases)))
            self.biases.append(biases)
        self.slots = slots
        rotary = [Rotary(torch.randn(DIM // 2))]
        self.out_norm = self._norm(has_layer_norms)
        self.resident, self.cached = (PackedDecoder(it, rotary, self.out_norm) for it in (resident, cached))

    @staticmethod
    def _norm(is_layer_norm):
        return NormWeights(torch.randn(HIDDEN), 1e-6, is_layer_norm, torch.randn(HIDDEN) if is_layer_norm else None)

    def begin(self, decoder, tokens, *, keeps_choices=True, keeps_inputs=False):
        torch.manual_seed(1)
        block_bytes = kv_block_bytes(torch.float32, num_kv_heads=1, block_size=16, head_dim=DIM)
        blocks = [
            KVBlocks(allocate_lazily(2 * block_bytes), torch.float32, num_kv_heads=1, block_size=16, head_dim=DIM)
            for _ in range(LAYERS)
        ]
        metadata = AttentionMetadata.build(
            starts=[0], num_tokens=[tokens], block_ids=[[0, 1]], block_size=16, device="cpu"
        )
        hidden = torch.randn(tokens, HIDDEN)
        kept = {"keeps_choices": keeps_choices, "keeps_inputs": keeps_inputs}
        return decoder.begin(hidden, torch.arange(tokens) + 3, blocks, metadata, **kept)

    def slot_sums(self, number, slots):
        return SlotExperts(self.slots, EXPERTS, slots, self.biases[number]).sums

    def run(self, tokens):
        work = self.begin(self.resident, tokens)
        assert work.run() == LAYERS
        assert torch.equal(work.out, normalise(work.hidden, self.out_norm))
        return work.hidden, work.topk_ids


@pytest.mark.parametrize("weight_format", MADE_FORMATS)
@pytest.mark.usefixtures("some_threads")
def test_slots_and_stops_change_no_bit(isa, weight_format):
    model = Model(weight_format)
    places = model.table.clone()
    for tokens in (1, 3, 20):
        expected, topk_ids = model.run(tokens)
        work = model.begin(model.cached, tokens)
        assert work.run() == LAYERS
        assert torch.equal(work.hidden, expected)
        assert torch.equal(work.topk_ids, topk_ids)

        work = model.begin(model.cached, tokens)
        stops, first = [], 0
        model.table.fill_(ABSENT)
        while (stopped := work.run(first)) < LAYERS:
            number = len(stops)
            slots = dict(enumerate(places[number].tolist()))
            work.add_experts(model.slot_sums(number, slots), number)
            stops.append(stopped)
            first = stopped + 1
        model.table.copy_(places)
        assert stops == [0, 2, 3]
        assert torch.equal(work.hidden, expected)
        assert work.run(LAYERS) == LAYERS  # only the norm is left
        assert torch.equal(work.out, normalise(expected, model.out_norm))


@pytest.mark.parametrize("tokens", [1, 5, 20])
@pytest.mark.parametrize("cuts", [(2 * DIM, 2 * DIM), (2 * DIM, DIM, DIM), (5, 4 * DIM - 5)])
def test_projections_in_parts_change_no_bit(isa, tokens, cuts):
    """Queries, keys and values of several matrices are those of one, with their biases."""
    model = Model("float32")
    layers = [dataclasses.replace(layer, in_bias=torch.randn(4 * DIM)) for layer in model.resident.layers]
    ends = list(itertools.accumulate(cuts, initial=0))
    blocks = [[range(start, stop)] for start, stop in itertools.pairwise(ends)]
    in_parts = [dataclasses.replace(it, in_proj=[it.in_proj[0].take(block) for block in blocks]) for it in layers]
    works = [
        model.begin(PackedDecoder(each, model.resident.rotary, model.out_norm), tokens) for each in (layers, in_parts)
    ]
    assert [work.run() for work in works] == [LAYERS, LAYERS]
    assert torch.equal(works[0].hidden, works[1].hidden)


@pytest.mark.parametrize("tokens", [1, 3])
def test_what_experts_get_is_kept_for_all_layers(needs_kernels, tokens):
    """In memory, in slots, and with stops; also checked at each stop."""
    model = Model("bfloat16", has_layer_norms=True)
    places = model.table.clone()
    resident = model.begin(model.resident, tokens, keeps_inputs=True)
    assert resident.run() == LAYERS
    in_slots = model.begin(model.cached, tokens, keeps_inputs=True)
    assert in_slots.run() == LAYERS
    stopping, usual = (model.begin(model.cached, tokens, keeps_inputs=kept) for kept in (True, False))
    model.table.fill_(ABSENT)
    first = 0
    for number, layer in enumerate([0, 2, 3]):
        slots = dict(enumerate(places[number].tolist()))
        for work in (stopping, usual):
            assert work.run(first) == layer
            assert torch.equal(work.normed[layer if work is stopping else 0], resident.normed[layer])
            work.add_experts(model.slot_sums(number, slots), number)
        first = layer + 1
    assert stopping.run(first) == LAYERS
    expected, _ = model.run(tokens)
    for work in (resident, in_slots, stopping):
        assert torch.equal(work.normed, resident.normed)
        assert torch.equal(work.hidden, expected)
    assert len({tuple(rows.flatten().tolist()) for rows in resident.normed}) == LAYERS


@pytest.mark.parametrize("missing", [ABSENT, LOADING])
def test_a_pass_stops_at_the_first_expert_that_is_missing(needs_kernels, missing):
    model = Model("int8")
    _, topk_ids = model.run(1)
    model.table[1, int(topk_ids[1, 0, 1])] = missing
    work = model.begin(model.cached, 1)
    assert work.run() == 2
    assert torch.equal(work.choices(0, 2), topk_ids[:2])
    others = set(range(EXPERTS)) - set(topk_ids[2].flatten().tolist())
    model = Model("int8")
    model.table[2, list(others)] = missing
    assert model.begin(model.cached, 1).run() == LAYERS


def test_a_pass_stops_before_what_is_drafted_and_absent(needs_kernels):
    model = Model("float32")
    predicted = torch.zeros(3, EXPERTS, dtype=torch.uint8)
    _, topk_ids = model.run(1)
    other = min(set(range(EXPERTS)) - set(topk_ids[2].flatten().tolist()))
    predicted[2, other] = 1
    expected = Expected(predicted=predicted)
    assert model.begin(model.cached, 1).run(0, expected) == LAYERS
    model.table[2, other] = LOADING
    assert model.begin(model.cached, 1).run(0, expected) == LAYERS
    model.table[2, other] = ABSENT
    assert model.begin(model.cached, 1).run(0, NOTHING) == LAYERS
    assert model.begin(model.cached, 1).run(0, expected) == 2


@pytest.mark.parametrize("tokens", [1, 4])
def test_the_next_router_is_asked_about_what_this_layer_gets(needs_kernels, tokens):
    model = Model("float32")
    places = model.table.clone()
    for number, layer in enumerate([0, 2]):
        work = model.begin(model.cached, tokens)
        model.table[number] = ABSENT
        assert work.run() == layer
        model.table.copy_(places)
        router = model.cached.layers[[2, 3][number]].stage.router
        ids, _ = Routing(model.top_k, renormalize=True)(extension.linear(work.normed[0], router))
        _, chosen = model.run(tokens)
        for expert in range(EXPERTS):
            model.table[number + 1, expert] = ABSENT
            stopped = model.begin(model.cached, tokens).run(0, Expected(routers_ahead=1))
            next_layer = [2, 3][number]
            if expert in ids:
                assert stopped == layer
            elif expert in chosen[number + 1]:
                assert stopped == next_layer
            else:
                assert stopped == LAYERS
            model.table.copy_(places)


def test_routers_further_ahead_are_asked_at_the_first_layer_about_all_up_to_there(needs_kernels):
    model = Model("float32")
    places = model.table.clone()
    work = model.begin(model.cached, 2)
    model.table[0] = ABSENT
    assert work.run() == 0
    model.table.copy_(places)
    _, chosen = model.run(2)
    for number, layer in ((1, 2), (2, 3)):
        router = model.cached.layers[layer].stage.router
        ids, _ = Routing(model.top_k, renormalize=True)(extension.linear(work.normed[0], router))
        for expert in range(EXPERTS):
            model.table[number, expert] = ABSENT
            stops = {ahead: model.begin(model.cached, 2).run(0, Expected(routers_ahead=ahead)) for ahead in (1, 2, 4)}
            own = layer if expert in chosen[number] else LAYERS
            if expert in ids:
                assert stops[2] == stops[4] == 0
                assert stops[1] == 0 if number == 1 else stops[1] >= 2
            else:
                assert stops[2] == stops[4] == own
            model.table.copy_(places)


@pytest.mark.parametrize("weight_format", MADE_FORMATS)
@pytest.mark.usefixtures("some_threads")
def test_experts_in_parts_are_experts_at_once(isa, weight_format):
    model = Model(weight_format, top_k=3)
    experts, slots = model.resident.layers[0].stage.experts, model.table[0].tolist()

    def in_slots(part):
        return SlotExperts(model.slots, EXPERTS, {expert: slots[expert] for expert in part})

    for tokens in (0, 1, 7, 40):
        x, residual = torch.randn(tokens, HIDDEN), torch.randn(tokens, HIDDEN)
        ids = torch.rand(tokens, EXPERTS).argsort(dim=1)[:, :3].contiguous()
        weights = torch.rand(tokens, 3)
        for given in (None, residual):
            expected = experts.compute(x, ids, weights, given)
            assert torch.equal(in_slots(range(EXPERTS)).sums(x, ids, weights, given), expected)
            pairs = torch.full((3 * tokens, HIDDEN), torch.nan)
            for part in ([4, 1], [], [0], [2, 3]):
                in_slots(part).pairs(x, ids, weights, pairs)
            assert torch.equal(add_pairs(pairs, ids, given), expected)


def test_what_cannot_be_is_refused(needs_kernels):
    model = Model("float32")
    x, ids, weights = torch.randn(1, HIDDEN), torch.tensor([[0, 1]]), torch.rand(1, 2)

    def in_slots(slots):
        return SlotExperts(model.slots, EXPERTS, slots)

    with pytest.raises(IndexError, match="not in memory"):
        in_slots({0: 3}).sums(x, ids, weights, None)
    with pytest.raises(ValueError, match="no slot 17 among 17"):
        in_slots({0: 3, 1: 17})
    with pytest.raises(ValueError, match=r"\[1, 48\] is needed"):
        in_slots({0: 3, 1: 4}).sums(x[:, :2], ids, weights, None)
    with pytest.raises(ValueError, match=r"\[2, 48\] is needed"):
        in_slots({0: 3}).pairs(x, ids, weights, torch.empty(1, HIDDEN))


def wait_until(holds):
    """Return as soon as the condition holds: joining a thread does not wait for the end of objects it owns."""
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_what_is_kept_grows_to_the_largest_pass_and_goes_with_its_thread():
    model = Model("float32")
    model.run(30)  # now the workspace, which all threads share, is large enough
    before = extension.kept_bytes()
    seen = []
    for tokens in (4, 24, 10):
        with ThreadPoolExecutor(1) as threads:
            seen.append(threads.submit(lambda tokens=tokens: (model.run(tokens), extension.kept_bytes())[1]).result())
        wait_until(lambda: extension.kept_bytes() == before)
    small, large, medium = (held - before for held in seen)
    assert 4 * 24 * (4 + 2) * DIM <= large == 6 * small  # queries, keys, values, what attention returns
    assert medium * 24 == large * 10
    with ThreadPoolExecutor(1) as threads:
        for tokens in (10, 24, 4):
            threads.submit(model.run, tokens).result()
        assert extension.kept_bytes() - before == large
