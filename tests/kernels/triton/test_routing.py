"""The routing kernel against plain definitions in float64, and against the torch reference where numbers are equal."""

import math

import pytest
import torch

from moeflow.kernels.cpu import row_ops
from moeflow.kernels.routing import Routing
from moeflow.kernels.triton import launching, routing
from tests.kernels.test_routing import ROUTINGS, WITH_SHARED, make, plain

# The interpreter computes infinities with NumPy, which warns.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

DEEPSEEK_V3 = (1, 256, 8)
SHAPES = [(0, 16, 2), (1, 1, 1), (2, 16, 4), (2, 48, 5), DEEPSEEK_V3]


def launched(
    choose: Routing, logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the kernel finds, through the public call, with one launch, over poisoned outputs."""
    launches: list[object] = []

    def launch(kernel: object, grid: object, *arguments: object, **constants: object) -> None:
        launches.append(kernel)
        shape = (len(logits), choose.top_k + choose.num_shared)
        outputs = [it for it in arguments if isinstance(it, torch.Tensor) and it.shape == shape]
        outputs[-1].fill_(math.nan)
        outputs[-2].fill_(-1)
        launching.launch(kernel, grid, *arguments, **constants)

    with monkeypatch.context() as patch:
        patch.setattr(row_ops, "_AVAILABLE", False)
        patch.setattr(launching, "accepts", lambda x: True)
        patch.setattr(routing, "launch", launch)
        ids, weights = choose(logits)
    assert len(launches) == 1
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
    return ids, weights


@pytest.mark.parametrize("family", ROUTINGS | WITH_SHARED)
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_and_weights_are_as_defined(
    shape: tuple[int, int, int], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens, num_experts, top_k = shape
    torch.manual_seed(num_experts)
    choose = make(top_k, num_experts, (ROUTINGS | WITH_SHARED)[family])
    try:
        choose.check(num_experts)
    except ValueError:
        pytest.skip("no such groups")
    logits = torch.randn(num_tokens, num_experts + choose.has_shared_gate) * 2
    ids, weights = launched(choose, logits, monkeypatch)
    for row, got_ids, got in zip(logits.tolist(), ids.tolist(), weights.tolist(), strict=True):
        want_ids, want = plain(row, choose)
        assert got_ids == want_ids
        assert got == pytest.approx(want, rel=5e-6, abs=1e-7)


@pytest.mark.parametrize("family", ROUTINGS)
def test_of_equals_the_lower_number_comes_first(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = make(6, 24, {name: it for name, it in ROUTINGS[family].items() if name != "choice_bias"})
    torch.manual_seed(7)
    logits = torch.tensor([-0.0, 0.0, 1.0, 2.0, -math.inf])[torch.randint(0, 5, (3, 24))]
    found = launched(choose, logits, monkeypatch)
    monkeypatch.setattr(row_ops, "_AVAILABLE", False)
    for got, want in zip(found, choose(logits), strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v2", "deepseek_v3", "phimoe"])
def test_scores_that_are_not_numbers_give_experts_nonetheless(
    value: float, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = make(3, 32, ROUTINGS[family])
    logits = torch.randn(2, 32)
    logits[0, 9] = value
    ids, weights = launched(choose, logits, monkeypatch)
    assert all(len(set(row)) == 3 and set(row) <= set(range(32)) for row in ids.tolist())
    assert not weights[1].isnan().any()
    if math.isnan(value):
        assert ids[0, 0] == 9
        assert weights[0].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_may_be_columns_of_other_types(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(2, 40).to(dtype)[:, :20]
    choose = Routing(2, renormalize=True)
    for got, want in zip(launched(choose, logits, monkeypatch), choose(logits.float().clone()), strict=True):
        torch.testing.assert_close(got, want)
