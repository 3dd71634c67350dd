"""Collectives between real processes against what plain Python gives, through shared memory and over TCP."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.core.errors import GroupError
from moeflow.kernels.cpu import extension
from tests.parallel.ranks import Ranks, ranks, together

__all__ = ["ranks"]  # a fixture

pytestmark = [
    pytest.mark.slow,  # processes that import torch
    pytest.mark.skipif(not extension.is_available(), reason="needs the extension"),
]

SIZE = 3
ROWS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30)  # a buffer of shared memory has 8: up to 4 pieces


@pytest.fixture(scope="module", params=["join", "join_over_tcp"])
def make(request, ranks: Ranks) -> Callable[[int], list]:
    return getattr(ranks, request.param)


@pytest.fixture(scope="module")
def group(make) -> list:
    return make(SIZE)


@given(st.lists(ROWS, min_size=SIZE, max_size=SIZE))
@settings(max_examples=100)
def test_all_gather_gives_everybody_everything(group, rows):
    assert together(group, "gather_lists", "rows", of_each=lambda rank: (rows[rank],)) == [rows] * SIZE


@given(st.lists(st.lists(ROWS, min_size=SIZE, max_size=SIZE), min_size=SIZE, max_size=SIZE))
@settings(max_examples=100)
def test_all_to_all_gives_each_its_own(group, parts):
    received = together(group, "exchange_lists", "parts", of_each=lambda rank: (parts[rank],))
    assert received == [[parts[source][rank] for source in range(SIZE)] for rank in range(SIZE)]


def test_tensors_keep_dtype_and_shape(group):
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int8):
        tensors = [torch.arange(rank * 6).reshape(rank, 2, 3).transpose(1, 2).to(dtype) for rank in range(SIZE)]
        for gathered in together(group, "gather", "rows", of_each=lambda rank: (tensors[rank],)):  # noqa: B023
            assert all(tensor.dtype is dtype for tensor in gathered)
            assert all(torch.equal(got, want) for got, want in zip(gathered, tensors, strict=True))


def test_thousands_in_a_row(group):
    assert together(group, "many", 3000, 1) == [3000] * SIZE


def test_a_group_of_one(make):
    (rank,) = make(1)
    assert together([rank], "gather_lists", "rows", [1, 2, 3]) == [[[1, 2, 3]]]
    assert together([rank], "exchange_lists", "parts", [[1, 2, 3]]) == [[[1, 2, 3]]]


def test_different_names_that_meet(make):
    group = make(SIZE)
    errors = together(group, "barrier", of_each=lambda rank: ("morning" if rank < 2 else "evening",))
    for error in errors:
        assert isinstance(error, GroupError)
        assert re.search("rank 2 .*is at barrier 'evening'", str(error))
        assert "is at barrier 'morning'" in str(error)
    for error in together(group, "barrier", "noon"):
        assert "the group ended before barrier 'noon' did" in str(error)


def test_other_shapes_are_noticed(make):
    group = make(2)
    for error in together(group, "gather", "rows", of_each=lambda rank: (torch.zeros(2, 3 + rank),)):
        assert "torch.float32 [*, 3]" in str(error)
        assert "torch.float32 [*, 4]" in str(error)
