"""Ranks on devices add up by torch.distributed; threads stand for the ranks, and gloo for NCCL."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from moeflow.core.errors import ConfigError, GroupError
from moeflow.core.parallel_config import device_of_rank
from moeflow.parallel.blocks import even_blocks
from moeflow.parallel.device_group import DeviceGroup, SummedColumns
from tests.parallel.thread_group import run_ranks

CPU = torch.device("cpu")
SIZE = 3


def test_all_ranks_get_the_sum_in_the_type_of_their_parts():
    parts = {dtype: torch.arange(6 * SIZE).view(SIZE, 2, 3).to(dtype) for dtype in (torch.float32, torch.bfloat16)}

    def sums(host):
        group = DeviceGroup(host, CPU)
        return {dtype: group.all_reduce("parts", part[host.rank].clone()) for dtype, part in parts.items()}

    for found in run_ranks(SIZE, sums):
        for dtype, part in parts.items():
            assert found[dtype].dtype is dtype
            assert torch.equal(found[dtype], part.sum(dim=0))


def test_all_ranks_get_the_same_bits():
    parts = torch.randn(SIZE, 1000)
    first, *others = run_ranks(SIZE, lambda host: DeviceGroup(host, CPU).all_reduce("parts", parts[host.rank].clone()))
    torch.testing.assert_close(first, parts.sum(dim=0))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("count", [1, 2, 7, 32])
def test_columns_are_those_of_the_whole(count):
    whole = torch.randn(5, count)

    def gathered(host):
        columns = SummedColumns(DeviceGroup(host, CPU), "columns", even_blocks(count, SIZE))
        return columns.gather(columns.of(whole))

    assert all(torch.equal(found, whole) for found in run_ranks(SIZE, gathered))


def test_what_lies_in_main_memory_goes_through_the_host():
    def exchange(host):
        group, own = DeviceGroup(host, CPU), torch.full((host.rank,), host.rank)
        before = host.sent_bytes
        return group.all_gather("rows", own), host.sent_bytes - before

    for rank, (found, sent_bytes) in enumerate(run_ranks(SIZE, exchange)):
        assert [part.tolist() for part in found] == [[], [1], [2, 2]]
        assert sent_bytes == 8 * rank * (SIZE - 1)


def test_a_rank_that_is_gone_ends_a_sum_with_its_name():
    def leave_or_add(host):
        group = DeviceGroup(host, CPU)
        if host.rank == 0:
            return None
        with pytest.raises(GroupError, match="all_reduce 'o_proj' failed"):
            group.all_reduce("o_proj", torch.ones(4))
        return None

    run_ranks(2, leave_or_add)


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_gpus_without_nccl_are_refused_with_what_to_do():
    def meet(host):
        with pytest.raises(ConfigError, match=r"2 ranks .* NCCL, which this torch does not have: install"):
            DeviceGroup(host, torch.device("cuda", host.rank))

    run_ranks(2, meet)


@pytest.mark.parametrize(
    ("device", "rank", "expected"),
    [
        ("cuda", 0, "cuda:0"),
        ("cuda", 1, "cuda:1"),
        ("cuda:2", 1, "cuda:3"),
        ("softgpu", 1, "softgpu"),
        ("cpu", 3, "cpu"),
    ],
)
def test_gpus_of_ranks_follow_one_another(device, rank, expected):
    assert device_of_rank(device, rank) == expected
