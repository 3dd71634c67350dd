"""The special cases of exchange through shared memory; test_collectives.py has the tests common to all groups."""

from __future__ import annotations

import pytest

from moeflow.core.errors import ConfigError, GroupError
from moeflow.kernels.cpu import extension
from moeflow.parallel.shared_memory_group import SharedMemoryGroup, make_descriptor
from tests.parallel.ranks import ranks, together

__all__ = ["ranks"]  # a fixture

pytestmark = [
    pytest.mark.slow,  # processes that import torch
    pytest.mark.skipif(not extension.is_available(), reason="needs the extension"),
]


def test_ranks_that_take_turns_on_one_core(ranks):
    group = ranks.join(4)
    together(group, "use_one_core")
    assert together(group, "many", 1000, 2) == [1000] * 4
    together(group, "use_all_cores")


def test_long_names_differ_in_their_last_letter(ranks):
    group = ranks.join(2)
    errors = together(group, "barrier", of_each=lambda rank: ("ä" * 300 + str(rank),))
    assert all(isinstance(error, GroupError) and "do different things" in str(error) for error in errors)


def test_too_many_ranks_are_refused():
    with pytest.raises(ConfigError, match="1 to 64 ranks, not 65"):
        make_descriptor(65)
    with pytest.raises(ConfigError, match="1 to 64 ranks, not 0"):
        make_descriptor(0)


def test_without_the_extension(monkeypatch):
    monkeypatch.setattr(extension, "_WHY_NOT", "nobody compiled it")
    with pytest.raises(ConfigError, match="nobody compiled it"):
        make_descriptor(2)
    with pytest.raises(ConfigError, match="nobody compiled it"):
        SharedMemoryGroup(0, 0, [1, 2], 1.0)
