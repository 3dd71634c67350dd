"""The host's number of experts: the best by measured times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.engine.offload import host_split
from moeflow.engine.offload.host_split import WORTH_IT, HostExpertSplit
from moeflow.models.registry import read_bare_config
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from moeflow.planner.model_files import shipped_models

COSTS = ModelCosts(
    read_bare_config(shipped_models()["mixtral-8x7b"]),
    Formats(matrices="int4", embeddings="int4", kv="bfloat16", activation_bytes=4),
)
LAYERS, EXPERTS = COSTS.shape.num_layers, COSTS.shape.routing.num_experts
GB = 1e9


class Machine:
    """A share with the measurements of a machine of these speeds."""

    def __init__(self, monkeypatch, *, link=1e10, expert_s=1e-6, attention_s=1e-9, fixed=None, dense=()):
        self.now = 0.0
        monkeypatch.setattr(host_split, "perf_counter", lambda: self.now)
        self.share = HostExpertSplit(COSTS, [layer not in dense for layer in range(LAYERS)], EXPERTS - 2, fixed)
        self.link, self.expert_s, self.attention_s = link, expert_s, attention_s

    def run(self, num_tokens, num_read, num_micro_batches=8):
        """Run a pass, and return how many experts the host had."""
        self.share.begin_pass(num_tokens, num_read, num_micro_batches)
        self.share.uploaded(int(GB), GB / self.link)
        for layer, border in enumerate(self.share.borders):
            with self.share.attending(num_read):
                self.now += self.attention_s * num_read
            if border:
                with self.share.computing(layer, num_tokens):
                    self.now += self.expert_s * num_tokens * border
        return self.share.num_hosted

    def seconds(self, num_hosted, num_tokens, num_read, num_micro_batches=8):
        """Return what the slower of link and host takes; the host waits for a page of each layer."""
        shape, average = COSTS.shape, num_hosted / LAYERS
        sums = 4 * shape.hidden_size * (1 - (1 - average / EXPERTS) ** shape.routing.top_k)
        small = num_tokens * LAYERS * (shape.attention.num_heads * shape.attention.head_dim * 4 + sums)
        weights = ((EXPERTS - 2) * LAYERS - num_hosted) * COSTS.expert_bytes
        host_s = LAYERS * self.attention_s * num_read + num_hosted * self.expert_s * num_tokens
        return max((weights + small) / self.link, host_s + weights / num_micro_batches / self.link)


def test_it_measures_first():
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch)
        assert machine.run(16, 1000) == 0  # nothing is known
        assert machine.run(16, 1000) == LAYERS  # of each layer one, to see how fast the host is
        assert machine.run(16, 1000) > LAYERS


@given(
    st.floats(1e8, 1e11),
    st.floats(1e-8, 1e-2),
    st.floats(1e-10, 1e-6),
    st.integers(1, 3000),
    st.integers(1, 100_000),
    st.integers(1, 64),
)
def test_no_other_number_is_much_faster(link, expert_s, attention_s, num_tokens, num_read, num_parts):
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch, link=link, expert_s=expert_s, attention_s=attention_s)
        for _ in range(4):
            chosen = machine.run(num_tokens, num_read, num_parts)
        numbers = range((EXPERTS - 2) * LAYERS + 1)
        others = [machine.seconds(number, num_tokens, num_read, num_parts) for number in numbers]
        assert machine.seconds(chosen, num_tokens, num_read, num_parts) * WORTH_IT <= min(others) * 1.001


def test_a_single_micro_batch_waits_for_all_that_is_streamed(monkeypatch):
    """Streaming an expert takes 8 times as long as the host needs: with one micro-batch, nothing hides that."""
    machine = Machine(monkeypatch, link=COSTS.expert_bytes / 8e-3, expert_s=1e-3 / 4)
    for _ in range(3):
        of_one = machine.run(4, 100, 1)
    for _ in range(3):
        of_many = machine.run(4, 100, 64)
    assert of_one == (EXPERTS - 2) * LAYERS > of_many


def test_a_long_prompt_and_a_decoding_step_have_shares_of_their_own(monkeypatch):
    machine = Machine(monkeypatch, expert_s=1e-4)
    chosen = [machine.run(size, 100) for size in (4, 4, 4, 2000, 2000, 4)]
    assert chosen[2] == chosen[5] > 3 * chosen[4]


def test_the_host_is_measured_with_long_prompts_before_they_count_as_slow(monkeypatch):
    """Steps wait for the experts' bytes, which a long prompt reads once, too: a token of it takes far less time."""
    machine = Machine(monkeypatch, expert_s=1e-3)
    for _ in range(4):
        machine.run(4, 100)
    machine.expert_s = 1e-6
    assert machine.run(2000, 100) == LAYERS
    assert machine.run(2000, 100) > 3 * LAYERS


def test_layers_share_evenly(monkeypatch):
    machine = Machine(monkeypatch, expert_s=2e-4, dense=(1,))
    for _ in range(3):
        machine.run(16, 100)
    borders = machine.share.borders
    assert borders[1] == 0
    assert max(borders) - min(borders[:1] + borders[2:]) <= 1


def test_a_number_may_be_said(monkeypatch):
    for said, expected in ((0, 0), (3, 3), (8, EXPERTS - 2)):
        machine = Machine(monkeypatch, fixed=said)
        assert [machine.run(16, 100) for _ in range(3)] == [expected * LAYERS] * 3
