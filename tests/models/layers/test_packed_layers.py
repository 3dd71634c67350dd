"""Models whose layers run in one call answer like the same model layer by layer, to the bit, wherever experts are."""

from __future__ import annotations

import random
import zlib
from functools import cache
from time import perf_counter_ns

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.core.errors import StorageError
from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.cache.policies import POLICIES
from moeflow.experts.cached_experts import ExpertPool
from moeflow.experts.predict.predictor import MAX_TOKENS, RoutedModel
from moeflow.experts.predict.registry import NO_PREDICTOR, PREDICTORS
from moeflow.experts.prefetch.driver import PrefetchDriver
from moeflow.experts.prefetch.layer_source import LayerSource
from moeflow.experts.slot_arena import SlotArena
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.weight_format import WEIGHT_FORMATS
from moeflow.kv.storage import KVStorage
from moeflow.models.families import gemma4_text, qwen3_moe
from moeflow.models.layers.allocation.expert_homes import InCache
from moeflow.models.layers.allocation.packed import PackedAllocator
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.moe import MoE
from moeflow.pipeline.runtime.layer_times import NUM_PARTS, LayerFacts, LayerTimes
from tests.shapes import TINY

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
NUM_LAYERS, NUM_EXPERTS, BLOCK_SIZE = 4, 6, 16  # layers with experts; one more is dense
CONFIG = TINY.with_fields(
    vocab_size=50,
    hidden_size=32,
    num_layers=NUM_LAYERS + 1,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=16,
    num_experts=NUM_EXPERTS,
    dense_layers=(1,),
    dense_intermediate_size=48,
    tie_word_embeddings=True,
)
# Experts beside a network, whose results are normalised before they are added, and all scaled.
NORMED = CONFIG.with_fields(
    num_layers=NUM_LAYERS,
    dense_layers=(),
    shared_intermediate_size=24,
    has_value_norms=True,
    has_post_norms=True,
    has_norms_of_experts=True,
    has_layer_scales=True,
)
MODELS = {"qwen3_moe": (qwen3_moe.build, CONFIG), "gemma4_text": (gemma4_text.build, NORMED)}
PREDICTOR_NAMES = (NO_PREDICTOR, *PREDICTORS)


class Disk:
    """Spoils a slot as soon as a read into it is due, and reads on command.

    Without a seed reads end when they are waited for, in order; with one at any time in any order.
    """

    def __init__(self, slabs, arena, seed):
        self.slabs, self.arena = slabs, arena
        self.chance = None if seed is None else random.Random(seed)
        self.pending = []
        self.bad = set()

    def start_loads(self, jobs, on_done):
        for job in jobs:
            self.arena.tensor(job.slot).fill_(255)  # not a number, in every format of floats
        self.pending += [(job, on_done) for job in jobs]
        return [Handle(self, job) for job in jobs]

    def finish_one(self, _=None):
        job, on_done = self.pending.pop(0 if self.chance is None else self.chance.randrange(len(self.pending)))
        self.arena.tensor(job.slot)[: len(self.slabs[job.expert])] = self.slabs[job.expert]
        on_done(job, StorageError("damaged") if job.expert in self.bad else None)

    def finish_some(self):
        while self.pending and self.chance is not None and self.chance.random() < 0.5:
            self.finish_one()


class Handle:
    def __init__(self, disk, job):
        self.disk, self.job = disk, job
        self.has_begun = disk.chance is not None and disk.chance.random() < 0.3

    def cancel(self):
        if not self.has_begun:
            self.disk.pending = [entry for entry in self.disk.pending if entry[0] is not self.job]
        return not self.has_begun


def fill(model):
    for name, place in model.named_weights():
        chance = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        weight = torch.randn(tuple(place.shape), generator=chance) / 4
        if isinstance(place, torch.Tensor):
            place.copy_(1 + weight if weight.dim() == 1 else weight)
        else:
            place.fill(weight, torch.arange(len(weight)))


@cache
def resident_model(weight_format, family="qwen3_moe"):
    place = PackedAllocator(torch.float32, torch.device("cpu"), WeightFormats(weight_format, "float32"))
    build, config = MODELS[family]
    model = build(config, place)
    fill(model)
    return model


def slabs_of(model):
    return [slab for layer in model.layers if isinstance(layer.mlp, MoE) for slab in layer.mlp.weights.storage]


def resident(cache):
    return [state.number for state in cache._states.all if state.slot >= 0]


class AlwaysOn:
    """A governor that no pass convinces."""

    is_on = True

    def end_pass(self, num_tokens, seconds):
        return None


class Cached:
    """The same model over a few slots."""

    def __init__(
        self,
        weight_format,
        num_slots,
        policy="lru",
        predictor=NO_PREDICTOR,
        seed=None,
        on_route=None,
        family="qwen3_moe",
    ):
        slabs = slabs_of(resident_model(weight_format, family))
        slab_bytes = len(slabs[0])
        arena = SlotArena(num_slots, slab_bytes)
        self.disk = Disk(slabs, arena, seed)
        self.cache = ExpertCache(
            num_layers=NUM_LAYERS,
            num_experts=NUM_EXPERTS,
            num_slots=num_slots,
            slab_bytes=slab_bytes,
            policy=POLICIES[policy](NUM_LAYERS, NUM_EXPERTS),
            start_loads=self.disk.start_loads,
            wait=self.disk.finish_one,
        )
        slots = PackedExperts(
            num_slots, CONFIG.hidden_size, CONFIG.feed_forward.intermediate_size, weight_format, storage=arena.slots
        )
        self.pool = ExpertPool(self.cache, slots)
        formats = WeightFormats(weight_format, "float32")
        allocator = PackedAllocator(
            torch.float32, torch.device("cpu"), formats, home=InCache(self.pool), on_route=on_route
        )
        build, config = MODELS[family]
        self.model = build(config, allocator)
        fill(self.model)
        if predictor != NO_PREDICTOR:
            routers = [layer.mlp for layer in self.model.layers if isinstance(layer.mlp, MoE)]
            made = PREDICTORS[predictor](RoutedModel(NUM_LAYERS, NUM_EXPERTS, routers))
            self.pool.prefetch = PrefetchDriver(self.cache, [LayerSource(AlwaysOn(), NUM_EXPERTS, made)])
        self.num_calls = 0  # of kernels over layers
        self._begin_kernels, self.cache.kernel_reads.begin = self.cache.kernel_reads.begin, self._begin

    def _begin(self):
        has_absent = self._begin_kernels()
        self.num_calls += 1
        self.disk.finish_some()  # while kernels would be running
        return has_absent

    def run(self, batch):
        self.cache.begin_pass()
        out = run(self.model, batch)
        self.cache.check_integrity()
        return out


def run(model, batch):
    """Run a pass over new sequences, each a list of token ids."""
    kv = KVStorage(
        layers=range(model.config.num_layers),
        num_blocks=len(batch),
        block_size=BLOCK_SIZE,
        num_kv_heads=CONFIG.attention.num_kv_heads,
        head_dim=CONFIG.attention.head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    attention = AttentionMetadata.build(
        starts=[0] * len(batch),
        num_tokens=[len(tokens) for tokens in batch],
        block_ids=[[number] for number in range(len(batch))],
        block_size=BLOCK_SIZE,
        device="cpu",
    )
    positions = torch.tensor([position for tokens in batch for position in range(len(tokens))])
    context = ForwardContext(positions, attention, kv)
    return model(torch.tensor([token for tokens in batch for token in tokens]), context)


def layer_by_layer(model, batch):
    packed, model._packed = model._packed, None
    try:
        return run(model, batch)
    finally:
        model._packed = packed


sequences = st.lists(st.integers(0, CONFIG.vocab_size - 1), min_size=1, max_size=4)
batches = st.lists(sequences, min_size=1, max_size=4)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_layers_in_one_call_are_layers_one_after_another(weight_format, family):
    model = resident_model(weight_format, family)
    for batch in ([[3]], [[1, 2, 3], [4], [5, 6]], [[7] * 16] * 3):
        assert torch.equal(run(model, batch), layer_by_layer(model, batch))


runs = given(
    family=st.sampled_from(sorted(MODELS)),
    weight_format=st.sampled_from(WEIGHT_FORMATS),
    policy=st.sampled_from(sorted(POLICIES)),
    predictor=st.sampled_from(PREDICTOR_NAMES),
    num_slots=st.integers(2, NUM_LAYERS * NUM_EXPERTS),
    passes=st.lists(batches, min_size=1, max_size=8),
    seed=st.integers(0, 2**16),
)


def check_bits(family, weight_format, policy, predictor, num_slots, passes, seed):
    cached = Cached(weight_format, num_slots, policy, predictor, seed, family=family)
    for batch in passes:
        assert torch.equal(cached.run(batch), run(resident_model(weight_format, family), batch))


test_every_bit_is_that_of_the_resident_model = settings(max_examples=60)(runs(check_bits))
test_every_bit_of_many_runs = pytest.mark.thorough(settings(max_examples=300)(runs(check_bits)))


@settings(max_examples=8)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    num_slots=st.integers(2, NUM_LAYERS * NUM_EXPERTS),
    passes=st.lists(st.lists(sequences.map(lambda tokens: tokens[:1]), min_size=1, max_size=2), max_size=20),
)
def test_the_cache_hears_what_it_would_have_heard_layer_by_layer(policy, num_slots, passes):
    cached, oracle = Cached("float32", num_slots, policy), Cached("float32", num_slots, policy)
    oracle.model._packed = None
    for batch in passes:
        assert torch.equal(cached.run(batch), oracle.run(batch))
        mine, theirs = cached.cache.stats(), oracle.cache.stats()
        assert (mine.hits, mine.late, mine.misses) == (theirs.hits, theirs.late, theirs.misses)
        assert (mine.evictions, mine.demand_bytes) == (theirs.evictions, theirs.demand_bytes)
        assert resident(cached.cache) == resident(oracle.cache)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("predictor", PREDICTOR_NAMES)
def test_a_pass_that_finds_all_it_needs_is_one_call(predictor, family):
    cached = Cached("float32", NUM_LAYERS * NUM_EXPERTS, predictor=predictor, family=family)
    batch = [[token] for token in range(24)]
    cached.run(batch)
    while cached.disk.pending:
        cached.disk.finish_one()
    cached.num_calls = 0
    before = cached.cache.stats()
    cached.run(batch[:8])
    assert cached.num_calls == 1
    after = cached.cache.stats()
    assert after.hits > before.hits
    assert after.misses == before.misses


@pytest.mark.parametrize("num_slots", [5, NUM_LAYERS * NUM_EXPERTS])
def test_who_records_routing_hears_every_layer_once_in_order(num_slots):
    heard, expected = [], []
    cached = Cached("float32", num_slots, on_route=lambda *of_layer: heard.append(of_layer))
    oracle = Cached("float32", num_slots, on_route=lambda *of_layer: expected.append(of_layer))
    oracle.model._packed = None
    for batch in ([[1, 2, 3]], [[4], [5]], [list(range(MAX_TOKENS + 1))], [[1]]):
        cached.run(batch)
        oracle.run(batch)
    assert len(heard) == len(expected) == 4 * NUM_LAYERS
    for (ids, inputs), (expected_ids, expected_inputs) in zip(heard, expected, strict=True):
        assert torch.equal(ids, expected_ids)
        assert (inputs is None) == (len(ids) > MAX_TOKENS)
        assert inputs is None or torch.equal(inputs, expected_inputs)


def test_a_damaged_expert_fails_the_pass_and_the_next_one_is_right():
    cached, batch = Cached("int8", 5), [[1, 2, 3]]
    cached.disk.bad = set(range(NUM_LAYERS * NUM_EXPERTS))
    with pytest.raises(StorageError, match="damaged"):
        cached.run(batch)
    cached.disk.bad = set()
    while cached.disk.pending:
        cached.disk.finish_one()
    assert torch.equal(cached.run(batch), run(resident_model("int8"), batch))


def timed(model, compute):
    """Return what `compute` does while the model tells its times, and these: of each layer in each call."""
    facts = [LayerFacts(number, True, layer.has_router, 0) for number, layer in enumerate(model.layers)]
    times = model.layer_times = LayerTimes(facts, 8)
    try:
        out = compute()
    finally:
        model.layer_times = None
    found = [list(each.times) for each in times.passes]
    return out, [[of[i : i + NUM_PARTS] for i in range(0, len(of), NUM_PARTS)] for of in found]


@pytest.mark.parametrize("family", MODELS)
def test_times_of_layers_change_no_bit_and_follow_each_other(family):
    model, batch = resident_model("float32", family), [[1, 2, 3], [4]]
    plain = run(model, batch)
    begun_ns = perf_counter_ns()
    out, (layers,) = timed(model, lambda: run(model, batch))
    in_order = [begun_ns, *(at for layer in layers for at in layer), perf_counter_ns()]
    assert torch.equal(out, plain)
    assert in_order == sorted(in_order)
    assert len(in_order) == 2 + NUM_PARTS * len(model.layers)
    out, (layers,) = timed(model, lambda: layer_by_layer(model, batch))
    assert torch.equal(out, plain)
    parts = [(begun, mixed, ended) for begun, mixed, _, ended in layers]
    assert all(begun < mixed < ended for begun, mixed, ended in parts)


@pytest.mark.parametrize("predictor", PREDICTOR_NAMES)
def test_layers_that_python_finishes_have_no_end(predictor):
    """It reports the spans of their experts itself."""
    cached, plain = (Cached("float32", 3, predictor=predictor) for _ in range(2))
    batch = [[1, 2, 3], [4]]
    out, (layers,) = timed(cached.model, lambda: cached.run(batch))
    assert torch.equal(out, plain.run(batch))
    assert cached.num_calls == plain.num_calls > 1
    assert all(begun < mixed < routed for begun, mixed, routed, _ in layers)
    num_finished = sum(ended > 0 for *_, ended in layers)
    num_stops = cached.num_calls - (layers[-1][-1] > 0)
    assert num_finished == len(layers) - num_stops


def test_times_need_room_for_all_layers():
    model = resident_model("float32", "qwen3_moe")
    model.layer_times = LayerTimes([LayerFacts(0, True, True, 0)], 1)
    with pytest.raises(ValueError, match="5 layers write 4 times"):
        run(model, [[1]])
    model.layer_times = None
