"""A group of one gives back what it is given, without a copy."""

import pytest
import torch

from moeflow.core.errors import GroupError
from moeflow.parallel.group import Group
from moeflow.parallel.solo_group import SoloGroup


def test_what_goes_in_comes_out():
    group: Group = SoloGroup()
    tensor = torch.arange(6).reshape(3, 2)
    assert (group.rank, group.size) == (0, 1)
    (gathered,) = group.all_gather("rows", tensor)
    (received,) = group.all_to_all("parts", [tensor])
    assert gathered is tensor
    assert received is tensor
    assert group.broadcast_bytes("message", b"abc") == b"abc"
    group.barrier("end")
    group.close()


def test_nothing_goes_on_after_an_abort():
    group = SoloGroup()
    group.abort("the disk is gone")
    group.abort("second thoughts")
    calls = (
        lambda: group.all_gather("rows", torch.zeros(1)),
        lambda: group.all_to_all("rows", [torch.zeros(1)]),
        lambda: group.broadcast_bytes("rows", b""),
        lambda: group.barrier("rows"),
    )
    for call in calls:
        with pytest.raises(GroupError, match="ended before 'rows': the disk is gone"):
            call()
