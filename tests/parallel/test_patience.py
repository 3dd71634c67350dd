"""A rank that computes long itself waits long for others; one that idles does not."""

from __future__ import annotations

from moeflow.parallel.patience import SLOWER, Patience


def test_others_may_take_so_many_times_as_long_as_this_rank():
    computed_s = 1000.0  # before the first collective, as by loading
    patience = Patience(30.0, lambda: computed_s)

    def collective(own_s: float) -> float:
        nonlocal computed_s
        computed_s += own_s
        patience.begin()
        computed_s += 500.0  # in a collective: not its own work
        patience.end()
        return patience.limit_s

    assert [collective(2000), collective(1), collective(4), collective(3), collective(0)] == [30, 30, 40, 40, 40]
    assert SLOWER == 10
