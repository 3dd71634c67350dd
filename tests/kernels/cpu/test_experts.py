"""The expert layer of the CPU extension, under every instruction set and in every format.

Held against float64 (every rounding accounted for) and against the torch reference `fused_experts`.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.kernels.activation import NONLINEARITIES, ClampedSwiglu, apply
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.expert_slots import PresentExperts
from moeflow.kernels.cpu.packed_experts import ExpertKind, PackedExperts
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.experts import fused_experts
from tests.kernels import cpu_reference as reference
from tests.kernels.cpu_reference import FORMATS, assert_within, pack_experts

TOKENS = (0, 1, 2, 3, 6, 7, 8, 9, 12, 13)
SIZES = (  # hidden, width: on, just below and just above bands of 16, groups of 32, tiles of 64
    (1, 1),
    (32, 16),
    (31, 15),
    (33, 17),
    (64, 32),
    (65, 48),
    (70, 33),
    (130, 65),
)
RELATIVE_ERROR = {"float32": 1e-6, "bfloat16": 1e-2, "int8": 2e-2, "int4": 2e-2}  # of activations in that form
RELATIVE_ERROR["int4-min"] = RELATIVE_ERROR["int4"]
CLAMPED = ClampedSwiglu(alpha=1.702, limit=1.5)  # both sides of the limit are common
RELATIVE_ERROR |= dict.fromkeys(("int8 wide", "int4 wide", "int4-min wide"), 1e-4)


def pack(hidden, width, weight_format, num_experts=5, *, function="silu", is_gated=True, has_bias=False):
    generator = torch.Generator().manual_seed(hidden + width)
    up_rows = 2 * width if is_gated else width
    gate_up = torch.randn(num_experts, up_rows, hidden, generator=generator) / hidden**0.5 * 2
    down = torch.randn(num_experts, hidden, width, generator=generator) / width**0.5
    biases = ExpertBiases(*(torch.randn(num_experts, size, generator=generator) for size in (up_rows, hidden)))
    return pack_experts(gate_up, down, weight_format, function=function, biases=biases if has_bias else None)


def route(num_tokens, hidden, top_k, num_experts=5, seed=0):
    """Return random rows, choices and weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hidden, generator=generator)
    topk_ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :top_k].contiguous()
    return x, topk_ids, torch.rand(num_tokens, top_k, generator=generator)


def check(packed, routed, isa):
    assert_within(packed.compute(routed[0], *routed[1:]), *reference.experts(routed[0], packed, *routed[1:], isa))


@pytest.mark.parametrize("weight_format", FORMATS)
class TestAgainstFloat64:
    @pytest.mark.parametrize(("hidden", "width"), SIZES)
    def test_any_number_of_tokens(self, isa, weight_format, hidden, width):
        packed = pack(hidden, width, weight_format)
        for num_tokens in TOKENS:
            check(packed, route(num_tokens, hidden, 2), isa)

    def test_any_number_of_experts_a_token(self, isa, weight_format):
        packed = pack(40, 24, weight_format, 9)
        for top_k in range(1, 9):
            check(packed, route(7, 40, top_k, 9), isa)

    def test_one_expert_takes_all(self, isa, weight_format):
        packed = pack(40, 24, weight_format)
        for num_tokens in (1, 6, 13, 97):
            x, topk_ids, topk_weights = route(num_tokens, 40, 1)
            check(packed, (x, torch.full_like(topk_ids, 3), topk_weights), isa)

    def test_an_only_expert(self, isa, weight_format):
        check(pack(40, 24, weight_format, 1), route(9, 40, 1, 1), isa)

    def test_most_experts_are_empty_and_one_is_crowded(self, isa, weight_format):
        x, topk_ids, topk_weights = route(40, 40, 2, 64)
        topk_ids[:30] = torch.tensor([63, 0])
        check(pack(40, 24, weight_format, 64), (x, topk_ids, topk_weights), isa)

    def test_an_expert_that_is_listed_twice_counts_twice(self, isa, weight_format):
        x, topk_ids, topk_weights = route(9, 40, 3)
        topk_ids[:, 2] = topk_ids[:, 0]
        check(pack(40, 24, weight_format), (x, topk_ids, topk_weights), isa)

    @pytest.mark.parametrize("function", NONLINEARITIES)
    def test_two_or_three_matrices_with_and_without_biases(self, isa, weight_format, function):
        for hidden, width in ((1, 1), (33, 17), (70, 97)):
            for is_gated, has_bias in itertools.product((True, False), repeat=2):
                packed = pack(hidden, width, weight_format, function=function, is_gated=is_gated, has_bias=has_bias)
                for num_tokens in (0, 1, 9):
                    check(packed, route(num_tokens, hidden, 2), isa)

    def test_a_clamped_swiglu_with_and_without_biases(self, isa, weight_format):
        for hidden, width in ((1, 1), (33, 17), (70, 97)):
            for has_bias in (True, False):
                packed = pack(hidden, width, weight_format, function=CLAMPED, has_bias=has_bias)
                for num_tokens in (0, 1, 9):
                    check(packed, route(num_tokens, hidden, 2), isa)

    @pytest.mark.slow
    def test_thousands_of_tokens(self, isa, weight_format):
        check(pack(100, 72, weight_format, 8), route(2049, 100, 3, 8), isa)

    @pytest.mark.usefixtures("some_threads")
    @settings(max_examples=10)
    @given(
        kind=st.fixed_dictionaries(
            {"function": st.sampled_from(NONLINEARITIES), "is_gated": st.booleans(), "has_bias": st.booleans()}
        ),
        num_tokens=st.integers(0, 20),
        hidden=st.integers(1, 140),
        width=st.integers(1, 100),
        top_k=st.integers(1, 5),
        num_threads=st.integers(1, 3),
        seed=st.integers(0, 99),
    )
    def test_layers_that_hypothesis_makes_up(
        self, isa, weight_format, kind, num_tokens, hidden, width, top_k, num_threads, seed
    ):
        extension.set_num_threads(num_threads)
        check(pack(hidden, width, weight_format, **kind), route(num_tokens, hidden, top_k, seed=seed), isa)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("function", NONLINEARITIES)
def test_close_to_the_torch_reference(isa, weight_format, function):
    for hidden, width, is_gated, has_bias in ((70, 33, True, False), (64, 32, False, True), (256, 100, True, True)):
        packed = pack(hidden, width, weight_format, function=function, is_gated=is_gated, has_bias=has_bias)
        routed = route(33, hidden, 3)
        want = fused_experts(routed[0], *packed.unpack(), *routed[1:], function=function, biases=packed.biases)
        got = packed.compute(routed[0], *routed[1:])
        assert (got - want).norm() <= RELATIVE_ERROR[weight_format] * want.norm()


@pytest.mark.parametrize("function", NONLINEARITIES)
def test_functions_are_as_exact_as_float32_allows(isa, function):
    """From where they are all but zero to where they are the identity."""
    units = torch.cat([torch.linspace(-12, 30, 4001), torch.logspace(-30, 5, 400), -torch.logspace(-30, 0.5, 400)])
    one = torch.ones(1, 1, 1)
    packed = PackedExperts.pack(one, one, "float32", function=function)
    ids, weights = torch.zeros(len(units), 1, dtype=torch.int64), torch.ones(len(units), 1)
    got = packed.compute(units.unsqueeze(1), ids, weights)[:, 0]
    x = units.double()
    # erfc, where torch's own gelu would be a difference of two numbers near 1
    want = x * torch.special.erfc(x * -(0.5**0.5)) / 2 if function == "gelu" else apply(function, x)
    if function == "gelu_tanh":
        want = x / (1 + (-2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).exp())
    assert_within(got, want, 7 * reference.UNIT * want.abs() + 1e-30)


@pytest.mark.parametrize("weight_format", FORMATS)
class TestSameBits:
    """What a token's result may not depend on."""

    @pytest.mark.parametrize("function", NONLINEARITIES)
    def test_alone_and_in_a_batch(self, isa, weight_format, function):
        for num_tokens, is_gated, has_bias in (
            (2, True, False),
            (97, True, False),
            (13, True, True),
            (13, False, True),
        ):
            packed = pack(70, 65, weight_format, function=function, is_gated=is_gated, has_bias=has_bias)
            routed = route(num_tokens, 70, 2)
            rows = (tuple(part[i : i + 1] for part in routed) for i in range(num_tokens))
            alone = torch.cat([packed.compute(x, *chosen) for x, *chosen in rows])
            assert torch.equal(packed.compute(routed[0], *routed[1:]), alone)

    def test_in_any_part_of_a_batch(self, isa, weight_format):
        packed = pack(64, 48, weight_format)
        routed = route(20, 64, 3)
        whole = packed.compute(routed[0], *routed[1:])
        for first, last in ((0, 7), (5, 6), (3, 20), (19, 20)):
            x, *chosen = (part[first:last] for part in routed)
            assert torch.equal(packed.compute(x, *chosen), whole[first:last])

    def test_in_any_order(self, isa, weight_format):
        packed = pack(65, 33, weight_format)
        routed = route(31, 65, 3)
        shuffle = torch.randperm(31, generator=torch.Generator().manual_seed(1))
        x, *chosen = (part[shuffle] for part in routed)
        assert torch.equal(packed.compute(x, *chosen), packed.compute(routed[0], *routed[1:])[shuffle])

    def test_in_whatever_order_its_router_lists_the_experts(self, isa, weight_format):
        packed = pack(40, 24, weight_format)
        x, topk_ids, topk_weights = route(9, 40, 5)
        want = packed.compute(x, topk_ids, topk_weights)
        for seed in range(3):
            slots = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
            got = packed.compute(x, topk_ids[:, slots].contiguous(), topk_weights[:, slots].contiguous())
            assert torch.equal(got, want)

    @pytest.mark.usefixtures("some_threads")
    def test_at_any_number_of_threads(self, isa, weight_format):
        packed = pack(600, 40, weight_format)  # two threads cut the last phase coarser than five
        routed = route(13, 600, 2)
        results = []
        for num_threads in (1, 2, 3, 5):
            extension.set_num_threads(num_threads)
            results.append(packed.compute(routed[0], *routed[1:]))
        assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("weight_format", FORMATS)
class TestValues:
    def test_the_residual_is_added_to_the_sum(self, isa, weight_format):
        packed = pack(40, 24, weight_format)
        x, *chosen = route(9, 40, 2)
        assert torch.equal(packed.compute(x, *chosen, residual=x), x + packed.compute(x, *chosen))

    def test_weights_of_zero_leave_zero(self, isa, weight_format):
        x, topk_ids, topk_weights = route(9, 40, 2)
        got = pack(40, 24, weight_format).compute(x, topk_ids, torch.zeros_like(topk_weights))
        assert (got == 0).all()

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_what_is_not_finite_shows_in_its_row_and_nowhere_else(self, isa, weight_format, value):
        for function in NONLINEARITIES:
            self.check_not_finite(pack(40, 24, weight_format, function=function, is_gated=function == "silu"), value)

    def check_not_finite(self, packed, value):
        x, *chosen = route(9, 40, 2)
        finite = packed.compute(x, *chosen)
        x[4, 39] = value
        got = packed.compute(x, *chosen)
        others = [row for row in range(9) if row != 4]
        assert torch.equal(got[others], finite[others])
        assert not got[4].isfinite().any()

    def test_very_small_and_very_large_activations(self, isa, weight_format):
        """Where a function is 0, where it is the identity, and far beyond what its exp can hold."""
        x, *chosen = route(9, 40, 2)
        for function, scale in itertools.product(NONLINEARITIES, (0.0, 1e-42, 1e-20, 30.0, 1e4)):
            packed = pack(40, 24, weight_format, function=function)
            want, error = reference.experts(x * scale, packed, *chosen, isa)
            assert_within(packed.compute(x * scale, *chosen), want, error + 1e-28)


@pytest.mark.parametrize("expert", [-1, 5, 2**40])
def test_experts_that_are_not_there_are_refused(isa, expert):
    x, topk_ids, topk_weights = route(9, 40, 2)
    topk_ids[7, 1] = expert
    with pytest.raises(IndexError, match="topk_ids names an expert that is not there"):
        pack(40, 24, "float32").compute(x, topk_ids, topk_weights)


def test_experts_that_do_not_fit_together_are_refused(needs_kernels):
    with pytest.raises(ValueError, match="do not match"):
        PackedExperts.pack(torch.zeros(2, 12, 8), torch.zeros(2, 8, 4), "float32")
    with pytest.raises(ValueError, match=r"does not take the biases float32 \[5, 4\]"):
        PackedExperts(5, 8, 4, "float32").with_biases(ExpertBiases(torch.zeros(5, 4), torch.zeros(5, 8)))
    with pytest.raises(ValueError, match="a clamped SwiGLU has gates"):
        PackedExperts(5, 8, 4, "float32", kind=ExpertKind(CLAMPED, is_gated=False))


def test_parts_of_experts_are_filled_one_by_one(needs_kernels):
    """As loading does: what `pack` packs at once comes out the same in parts."""
    for is_gated in (True, False):
        want = pack(40, 24, "float32", is_gated=is_gated)
        got = PackedExperts(5, 40, 24, "float32", kind=ExpertKind(is_gated=is_gated))
        gate_up, downs = want.unpack()
        sources = [[*torch.split(up, 24), down] for up, down in zip(gate_up, downs, strict=True)]
        parts = got.parts()
        for destinations, tensors in zip(parts, sources, strict=True):
            for part, source in zip(destinations, tensors, strict=True):
                part.fill(source, torch.arange(len(source)))
        assert torch.equal(got.storage, want.storage)


@pytest.mark.parametrize("absent", [(), (0, 3), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_absent_experts_add_nothing(needs_kernels, num_tokens, absent):
    packed = pack(64, 48, "float32", has_bias=True)
    x, topk_ids, topk_weights = route(num_tokens, 64, 3)
    table = np.arange(5, dtype=np.int32)
    out = torch.full((num_tokens, 64), torch.nan)
    compute = PresentExperts(packed, table).sums(x, topk_ids, topk_weights, out)
    table[list(absent)] = -1  # each call reads the table
    compute()
    is_present = torch.from_numpy(table)[topk_ids] >= 0
    assert torch.equal(out, packed.compute(x, topk_ids, topk_weights * is_present))


def test_choices_without_weight_are_not_computed(isa):
    gate_up, down = torch.randn(5, 48, 40), torch.randn(5, 40, 24)
    x, ids, weights = route(7, 40, 2)
    weights[ids == 3] = 0
    want = pack_experts(gate_up, down, "float32").compute(x, ids, weights)
    gate_up[3] = torch.nan
    assert torch.equal(pack_experts(gate_up, down, "float32").compute(x, ids, weights), want)
