"""Batches on a GPU: as many requests as memory and readers allow, and passes long enough to be bound by arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeflow.core.units import GIB, MIB
from moeflow.planner.choices.batching_choice import Batching
from moeflow.planner.choices.gpu_batching import SpareMemory, gpu_batching
from moeflow.planner.costs.gpu_work_space import pass_bytes
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.usage import OFFLINE, SERVING, TYPICAL, Usage
from moeflow.settings.settings import Settings
from tests.planner.examples import HALF, SMALL

DEFAULT = Batching(32, 512)
WIDE = SpareMemory(left_bytes=16 * GIB, kv_bytes=4 * GIB, request_bytes=MIB, pass_bytes=1000)


class Speed:
    """Passes that take `flat_s`, or `token_s` a token if that is longer; steps likewise."""

    def __init__(self, flat_s: float, token_s: float) -> None:
        self.flat_s, self.token_s = flat_s, token_s

    def pass_s(self, num_tokens: int) -> float:
        return max(self.flat_s, num_tokens * self.token_s)

    step_s = pass_s


def chosen(spare=WIDE, speed=None, usage=SERVING, **settings):
    return gpu_batching(DEFAULT, Settings(**settings), usage, spare, speed)


@pytest.mark.parametrize(
    ("break_even", "tokens"), [(100, 2048), (2000, 2048), (2300, 4096), (4000, 4096), (4600, 8192), (10**6, 8192)]
)
def test_a_pass_is_as_long_as_makes_prompts_faster(break_even, tokens):
    token_s = 1e-7
    found = chosen(speed=Speed(break_even * token_s, token_s))
    assert found.max_num_batched_tokens == tokens
    assert found.why_tokens == f"a pass over a prompt takes {max(break_even, tokens) * token_s:.2g} s"


def test_nobody_waits_long_for_a_pass_except_offline():
    slow = Speed(0.9, 3e-4)  # 1.2 seconds for 4096 tokens
    assert chosen(speed=slow).max_num_batched_tokens == 2048
    assert chosen(speed=slow, usage=OFFLINE).max_num_batched_tokens == 4096


@pytest.mark.parametrize(("left_bytes", "tokens"), [(2048 * 8000, 2048), (8192 * 8000, 8192), (2047 * 8000, 512)])
def test_a_pass_takes_an_eighth_of_the_memory_at_most(left_bytes, tokens):
    spare = SpareMemory(left_bytes=left_bytes, kv_bytes=4 * GIB, request_bytes=MIB, pass_bytes=1000)
    assert chosen(spare, Speed(10.0, 1e-7), usage=OFFLINE).max_num_batched_tokens == tokens


def test_unknown_speeds_have_passes_of_2048_tokens():
    found = chosen()
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (256, 2048)
    assert dict(found.reasons()).keys() == {"max_num_seqs", "max_num_batched_tokens"}


@pytest.mark.parametrize(("kv_bytes", "number"), [(300 * MIB, 256), (100 * MIB, 96), (32 * MIB, 32), (5 * MIB, 32)])
@pytest.mark.parametrize("speed", [None, Speed(0.01, 1e-6)])
def test_as_many_requests_run_as_keys_and_values_fit(kv_bytes, number, speed):
    spare = SpareMemory(left_bytes=16 * GIB, kv_bytes=kv_bytes, request_bytes=MIB, pass_bytes=1000)
    assert chosen(spare, speed).max_num_seqs == number


def test_readers_are_not_left_behind():
    assert chosen(speed=Speed(0.01, 0.003)).max_num_seqs == 64  # of 0.25 s
    assert chosen(speed=Speed(0.01, 0.003), usage=OFFLINE).max_num_seqs == 256


@pytest.mark.parametrize("speed", [None, Speed(0.01, 1e-6)])
def test_no_more_run_than_there_are(speed):
    few = Usage(num_requests=40, is_interactive=speed is not None)
    assert gpu_batching(Batching(32, 512), Settings(), few, WIDE, speed).max_num_seqs in (32, 40)
    one = Usage(num_sequences=1, is_interactive=True)
    assert gpu_batching(Batching(1, 512), Settings(), one, WIDE, speed).max_num_seqs == 1


def test_values_of_the_user_stay():
    asked = Batching(7, 300)
    settings = Settings(max_num_seqs=7, max_num_batched_tokens=300)
    assert gpu_batching(asked, settings, SERVING, WIDE, Speed(1.0, 1e-9)) == asked
    assert chosen(speed=Speed(1e-3, 1e-9), max_num_batched_tokens=512).max_num_batched_tokens == 512
    many = gpu_batching(Batching(5000, 5000), Settings(max_num_seqs=5000), SERVING, WIDE, None)
    assert (many.max_num_seqs, many.max_num_batched_tokens) == (5000, 5000)


def test_a_request_has_keys_values_and_logits():
    costs = ModelCosts(SMALL, HALF)
    spare = SpareMemory.of(1e9, costs, Settings(), TYPICAL)
    kv = 2 * 2 * 64 * SMALL.num_layers * 2 * 640  # keys and values of two heads in two bytes
    assert spare.request_bytes == kv + pass_bytes(costs, num_tokens=0, num_sampled=1)
    assert (spare.kv_bytes, spare.left_bytes) == (0.25e9, 1e9)
    assert SpareMemory.of(1e9, costs, Settings(kv_cache_bytes=100), TYPICAL).kv_bytes == 100
    odd = replace(TYPICAL, gen_len=129)
    assert SpareMemory.of(1e9, costs, Settings(), odd).request_bytes == spare.request_bytes + kv * 16 / 640
