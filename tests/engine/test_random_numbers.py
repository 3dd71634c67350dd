"""The numbers belong to seed and position, look uniform, and differ between neighbours."""

import statistics

from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.sampling_params import MAX_SEED
from moeflow.engine.random_numbers import child_seed, mix, uniform

seeds = st.integers(-MAX_SEED - 1, MAX_SEED)


def test_mix_is_the_published_splitmix64():
    # the first outputs of splitmix64 seeded with 1234567, as Rosetta Code and the C reference list them
    state, outputs = 1234567, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) & (2**64 - 1)
        outputs.append(mix(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(seeds, st.integers(0, 2**20))
def test_uniform_is_a_function_into_the_unit_interval(seed, position):
    assert uniform(seed, position) == uniform(seed, position)
    assert 0.0 <= uniform(seed, position) < 1.0


def test_uniform_fills_ten_bins_evenly_over_positions_and_over_seeds():
    for numbers in ([uniform(7, i) for i in range(10_000)], [uniform(i, 7) for i in range(10_000)]):
        counts = [0] * 10
        for number in numbers:
            counts[int(number * 10)] += 1
        chi_square = sum((count - 1000) ** 2 / 1000 for count in counts)
        assert chi_square < 27.9  # 0.1% quantile at 9 degrees of freedom


def test_neighbouring_seeds_and_positions_are_uncorrelated():
    here = [uniform(0, i) for i in range(5_000)]
    for there in ([uniform(1, i) for i in range(5_000)], [uniform(0, i + 1) for i in range(5_000)]):
        assert abs(statistics.correlation(here, there)) < 0.05


@given(seeds)
def test_the_first_child_keeps_the_seed_and_the_others_differ(seed):
    children = [child_seed(seed, index) for index in range(128)]
    assert children[0] == seed
    assert len(set(children)) == 128
    assert all(0 <= child <= MAX_SEED for child in children[1:])
