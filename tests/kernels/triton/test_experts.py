"""The expert layer's kernels against float64, in each form."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from moeflow.kernels import experts as public
from moeflow.kernels.activation import NONLINEARITIES, Activation, ClampedSwiglu, activate
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.norm import NormWeights
from moeflow.kernels.triton import experts, grouped_products, launching, matrix_products
from moeflow.kernels.triton.planar_blocks import from_blocks
from moeflow.kernels.triton.planar_weights import MadeFormat, pack
from moeflow.kernels.weight_format import BlockKind
from moeflow.models.layers.expert_weights import ExpertSlabs, slab_bytes
from tests.kernels.blocks import random_blocks
from tests.kernels.triton.tolerance import tolerance
from tests.marks import thorough_unless

NUM_EXPERTS, TOP_K, HIDDEN, WIDTH = 6, 2, 96, 40
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FORMS = {"pairs": 1, "experts": 9, "tiles": 17}  # with so many tokens


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with NaN, let 17 tokens be many, and compute their tiles by the kernel."""
    empty = torch.empty

    def poisoned(*arguments: Any, **options: Any) -> torch.Tensor:
        x = empty(*arguments, **options)
        return x.fill_(math.nan if x.is_floating_point() else -1)

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(experts, "_MOST_SCANNED", 32)
    monkeypatch.setattr(grouped_products, "CAPABILITY", None)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the kernels that have been started."""
    names: list[str] = []

    def launch(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        names.append(kernel.fn.__name__)
        launching.launch(kernel, grid, *arguments, **constants)

    for module in (experts, matrix_products):
        monkeypatch.setattr(module, "launch", launch)
    return names


class Given(NamedTuple):
    x: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def given(
    num_tokens: int,
    dtype: torch.dtype = torch.float32,
    *,
    width: int = WIDTH,
    is_gated: bool = True,
    num_experts: int = NUM_EXPERTS,
) -> Given:
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return Given(
        random(num_tokens, HIDDEN).to(dtype),
        (random(num_experts, (2 if is_gated else 1) * width, HIDDEN) / HIDDEN**0.5).to(dtype),
        (random(num_experts, HIDDEN, width) / width**0.5).to(dtype),
        torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :TOP_K].contiguous(),
        torch.rand(num_tokens, TOP_K, generator=generator),
    )


def weighted_pairs(
    layer: Given, function: Activation = "silu", biases: ExpertBiases | None = None, absent: tuple[int, ...] = ()
) -> torch.Tensor:
    """Return what the definition gives in float64: [T, K, H], 0 for experts that are absent."""
    x, gate_up, down, ids, weights = layer
    out = torch.zeros(*ids.shape, x.shape[1], dtype=torch.float64)
    for token, chosen in enumerate(ids.tolist()):
        for choice, expert in enumerate(chosen):
            if expert < 0 or expert in absent:
                continue
            units = gate_up[expert].double() @ x[token].double() + (biases.up[expert] if biases else 0)
            units = activate(function, units, is_gated=len(units) != down.shape[2])
            result = down[expert].double() @ units + (biases.down[expert] if biases else 0)
            out[token, choice] = weights[token, choice].double() * result
    return out


def check(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    torch.testing.assert_close(got.double(), expected, **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_forms_are_the_definition(form: str, dtype: torch.dtype) -> None:
    layer = given(FORMS[form], dtype)
    residual = torch.randn(layer.x.shape).to(dtype)
    got = experts.fused_experts(*layer, residual=residual)
    assert got.dtype == dtype
    check(got, weighted_pairs(layer).sum(dim=1) + residual.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("subtracts_mean", [False, True])
def test_the_sum_is_normalised_in_the_same_launch(subtracts_mean: bool, dtype: torch.dtype, started: list[str]) -> None:
    layer = given(3, dtype)
    residual, weight, bias = (torch.randn(size).to(dtype) for size in (layer.x.shape, HIDDEN, HIDDEN))
    norm = NormWeights(weight, 1e-5, subtracts_mean, bias if subtracts_mean else None)
    x, gate_up, down, *chosen = layer
    total, normed = experts.fused_experts_norm(
        x, (gate_up, down), *chosen, function="silu", biases=None, residual=residual, norm=norm
    )
    assert len(started) == 3
    assert torch.equal(total, experts.fused_experts(*layer, residual=residual))
    wide = total.double()
    if subtracts_mean:
        expected = torch.nn.functional.layer_norm(wide, (HIDDEN,), weight.double(), bias.double(), 1e-5)
    else:
        expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    check(normed, expected, dtype)


@pytest.mark.parametrize(
    ("form", "kernels"),
    [
        ("pairs", ["pair_kernel", "pair_kernel", "sum_kernel"]),
        ("experts", ["expert_kernel", "expert_kernel", "sum_kernel"]),
        ("tiles", ["sort_kernel", "tile_kernel", "tile_kernel", "sum_kernel"]),
    ],
)
def test_a_pass_starts_a_fixed_number_of_kernels(form: str, kernels: list[str], started: list[str]) -> None:
    layer = given(FORMS[form])
    experts.fused_experts(*layer, residual=layer.x)
    assert started == kernels


@pytest.mark.parametrize(
    ("form", "is_gated", "function"),
    thorough_unless(
        lambda form, is_gated, function: form == "pairs" or function == "silu",
        itertools.product(("pairs", "experts"), (True, False), (*NONLINEARITIES, ClampedSwiglu(alpha=1.7, limit=0.5))),
    ),
)
def test_functions_and_biases(form: str, is_gated: bool, function: Activation) -> None:
    if isinstance(function, ClampedSwiglu) and not is_gated:
        pytest.skip("it needs a gate")
    layer = given(FORMS[form], is_gated=is_gated)
    biases = ExpertBiases(torch.randn(NUM_EXPERTS, layer.gate_up.shape[1]), torch.randn(NUM_EXPERTS, HIDDEN))
    got = experts.fused_experts(*layer, function=function, biases=biases)
    check(got, weighted_pairs(layer, function, biases).sum(dim=1))


def test_biases_of_tiles() -> None:
    layer = given(FORMS["tiles"])
    biases = ExpertBiases(torch.randn(NUM_EXPERTS, 2 * WIDTH), torch.randn(NUM_EXPERTS, HIDDEN))
    check(experts.fused_experts(*layer, biases=biases), weighted_pairs(layer, biases=biases).sum(dim=1))


@pytest.mark.parametrize("form", FORMS)
def test_experts_lie_where_the_table_says(form: str) -> None:
    layer = given(FORMS[form])
    slots = torch.tensor([2, -1, 0, 3, -1, 4], dtype=torch.int32)
    moved = [torch.full((5, *part.shape[1:]), math.nan) for part in (layer.gate_up, layer.down)]
    for expert, slot in enumerate(slots.tolist()):
        if slot >= 0:
            moved[0][slot], moved[1][slot] = layer.gate_up[expert], layer.down[expert]
    got = experts.fused_experts(layer.x, *moved, layer.ids, layer.weights, slots=slots)
    check(got, weighted_pairs(layer, absent=(1, 4)).sum(dim=1))


@pytest.mark.parametrize("form", FORMS)
def test_experts_in_rows_of_a_stack_need_no_list(
    form: str, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, numbers = given(FORMS[form]), [7, 2, 9, 0, 4, 5]
    num_bytes = slab_bytes(HIDDEN, WIDTH, torch.float32)
    slabs = ExpertSlabs(HIDDEN, WIDTH, torch.float32, torch.zeros(NUM_EXPERTS, num_bytes, dtype=torch.uint8))
    stacked = slabs.in_stack(torch.full((10, num_bytes), 255, dtype=torch.uint8), numbers)
    for parts, gate_up, down in zip(stacked.parts(), layer.gate_up, layer.down, strict=True):
        for part, source in zip(parts, (*gate_up.chunk(2), down), strict=True):
            assert isinstance(part, torch.Tensor)
            part.copy_(source)
    expected = weighted_pairs(layer).sum(dim=1) + layer.x.double()
    for has_kernels in (True, False):
        monkeypatch.setattr(launching, "accepts", lambda _, has_kernels=has_kernels: has_kernels)
        started.clear()
        check(stacked.compute(layer.x, layer.ids, layer.weights, layer.x.clone()), expected)
        assert bool(started) == has_kernels


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("some", [range(NUM_EXPERTS), range(2, 5), range(0)])
def test_pairs_of_a_range_of_experts(form: str, some: range) -> None:
    layer = given(FORMS[form])
    absent = [expert for expert in range(NUM_EXPERTS) if expert not in some]
    for part in (layer.gate_up, layer.down):
        part[absent] = math.nan
    got = experts.expert_pairs(*layer, some)
    assert got.dtype == torch.float32
    check(got, weighted_pairs(layer, absent=tuple(absent)))


@pytest.mark.parametrize("form", FORMS)
def test_rows_without_experts_keep_the_residual(form: str) -> None:
    layer = given(FORMS[form])
    layer.ids[0] = -1
    layer.x[0] = math.nan
    residual = torch.randn(layer.x.shape)
    got = experts.fused_experts(*layer, residual=residual)
    check(got, weighted_pairs(layer).sum(dim=1) + residual.double())
    assert torch.equal(got[0], residual[0])


@pytest.mark.parametrize("form", FORMS)
def test_one_expert_may_get_every_row(form: str) -> None:
    layer = given(FORMS[form])
    layer.ids[:] = torch.tensor([3, 5])
    check(experts.fused_experts(*layer), weighted_pairs(layer).sum(dim=1))


@pytest.mark.parametrize(("form", "rows"), [("pairs", 1), ("experts", 6), ("tiles", 6)])
def test_a_row_does_not_depend_on_others(
    form: str, rows: int, monkeypatch: pytest.MonkeyPatch, started: list[str]
) -> None:
    layer = given(2 * rows, num_experts=4 * rows * TOP_K if form == "pairs" else NUM_EXPERTS)
    monkeypatch.setattr(experts, "_MOST_SCANNED", 0 if form == "tiles" else 512)
    together = experts.fused_experts(*layer)
    for part in (slice(0, rows), slice(rows, 2 * rows)):
        alone = experts.fused_experts(layer.x[part], *layer[1:3], layer.ids[part], layer.weights[part])
        assert torch.equal(alone, together[part])
    assert set(started) - {"sort_kernel", "sum_kernel"} == {f"{form.removesuffix('s')}_kernel"}


@pytest.mark.parametrize(
    ("dtype", "weight_format"),
    thorough_unless(
        lambda dtype, weight_format: (dtype == torch.float32) == (weight_format == "int4"),
        itertools.product((torch.float32, torch.bfloat16), ("int8", "int4")),
    ),
)
@pytest.mark.parametrize("form", FORMS)
def test_planar_integers(form: str, dtype: torch.dtype, weight_format: MadeFormat) -> None:
    layer = given(FORMS[form], dtype, width=64)
    gate_up, down = (pack(part, weight_format) for part in (layer.gate_up, layer.down))
    exact = layer._replace(gate_up=torch.stack(list(gate_up)), down=torch.stack(list(down)))
    got = experts.fused_experts(layer.x, gate_up, down, layer.ids, layer.weights)
    check(got, weighted_pairs(exact).sum(dim=1), dtype)


@pytest.mark.parametrize(
    ("form", "kinds"),
    thorough_unless(
        lambda form, kinds: (form == "experts") == (kinds[0] == "Q4_K"),
        itertools.product(FORMS, (("MXFP4", "F8_E4M3"), ("Q4_K", "Q6_K"))),
    ),
)
def test_blocks_of_files(form: str, kinds: tuple[BlockKind, BlockKind]) -> None:
    """Gates and ups may have another format than downs."""
    size, dtype = 256, torch.bfloat16
    gate_up, down = (
        from_blocks(
            torch.stack([random_blocks(kind, rows, size, seed, largest_scale=1 / 64) for seed in range(6)]), kind
        )
        for kind, rows in zip(kinds, (2 * size, size), strict=True)
    )
    layer = given(FORMS[form], dtype, width=64)
    floats, x = torch.stack(list(gate_up)), torch.randn(len(layer.ids), size)
    x = (4 * x / (floats @ x.T).abs().max()).to(dtype)
    exact = Given(x, floats, torch.stack(list(down)), layer.ids, layer.weights)
    expected = weighted_pairs(exact).sum(dim=1)
    scale = expected.abs().max()
    got = experts.fused_experts(x, gate_up, down, layer.ids, layer.weights)
    check(got / scale, expected / scale, dtype)


@pytest.mark.parametrize("form", FORMS)
def test_the_public_functions_use_the_kernels(form: str, monkeypatch: pytest.MonkeyPatch, started: list[str]) -> None:
    layer = given(FORMS[form])
    storage = torch.zeros(NUM_EXPERTS, slab_bytes(HIDDEN, WIDTH, torch.float32), dtype=torch.uint8)
    slabs = ExpertSlabs(HIDDEN, WIDTH, torch.float32, storage)
    slabs.gate_up[:], slabs.down[:] = layer.gate_up, layer.down
    packed = [pack(given(1, width=64)[place], "int4") for place in (1, 2)]
    chosen = (layer.ids, layer.weights)
    expected = slabs.compute(layer.x, *chosen, layer.x)
    expected_pairs = public.expert_pairs(layer.x, slabs.gate_up, slabs.down, *chosen, range(2, 4))
    expected_packed = public.fused_experts(layer.x, *packed, *chosen)
    assert not started
    monkeypatch.setattr(launching, "accepts", lambda x: True)
    torch.testing.assert_close(slabs.compute(layer.x, *chosen, layer.x), expected)
    pairs = public.expert_pairs(layer.x, slabs.gate_up, slabs.down, *chosen, range(2, 4))
    torch.testing.assert_close(pairs, expected_pairs)
    torch.testing.assert_close(public.fused_experts(layer.x, *packed, *chosen), expected_packed)
    assert started


def test_matrices_anywhere_are_left_to_torch(monkeypatch: pytest.MonkeyPatch, started: list[str]) -> None:
    layer = given(3)
    monkeypatch.setattr(launching, "accepts", lambda x: True)
    got = public.fused_experts(layer.x, list(layer.gate_up), list(layer.down), layer.ids, layer.weights)
    check(got, weighted_pairs(layer).sum(dim=1))
    assert not started


def test_pairs_are_sorted_and_counted_where_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_SORT_BLOCK", 16)  # several blocks
    ids = given(23).ids
    slots = torch.tensor([2, -1, 0, 3, 1, 4], dtype=torch.int32)
    pairs = matrix_products.Pairs(ids, NUM_EXPERTS, range(NUM_EXPERTS - 1), slots)
    order, (starts, counts) = experts._sort(pairs)
    assert torch.equal(order.long(), ids.flatten().argsort(stable=True))
    everywhere = torch.bincount(ids.flatten(), minlength=NUM_EXPERTS)
    assert torch.equal(starts.long(), everywhere.cumsum(0) - everywhere)
    assert torch.equal(counts.long(), everywhere * torch.tensor([1, 0, 1, 1, 1, 0]))
