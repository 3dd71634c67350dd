"""Stages are their operations one after another, to the bit; each of those has its own tests."""

from itertools import product

import pytest
import torch

from moeflow.kernels.capacity import ExpertCapacity
from moeflow.kernels.cpu import extension, stages
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.cpu.packed_weight import PackedWeight
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.norm import NormWeights, PostNorms, normalise
from moeflow.kernels.routing import Routing
from moeflow.kernels.weight_format import MADE_FORMATS

EPS = 1e-5


@pytest.mark.parametrize("weight_format", MADE_FORMATS)
@pytest.mark.parametrize(("num_outputs", "hidden"), [(33, 70), (528, 96)])  # a small product and one for the pool
@pytest.mark.usefixtures("some_threads")
def test_a_norm_on_the_way_into_a_product(isa, weight_format, num_outputs, hidden):
    weights, bias = torch.randn(hidden), torch.randn(num_outputs)
    norms = [NormWeights(weights, EPS), NormWeights(weights, EPS, True), NormWeights(weights, EPS, True, weights + 1)]
    weight = PackedWeight.pack(torch.randn(num_outputs, hidden), weight_format)
    for num_tokens in (0, 1, 4, 5, 70):
        x = torch.randn(num_tokens, hidden)
        for norm, given in product(norms, (None, bias)):
            want = extension.linear(normalise(x, norm), weight, given)
            assert torch.equal(stages.norm_linear(x, norm, weight, given), want)


class Layer:
    """The second half of a layer of five experts."""

    def __init__(
        self,
        weight_format,
        *,
        attended=48,
        hidden=70,
        width=40,
        top_k=2,
        renormalize=True,
        bias=False,
        function="silu",
        expert_biases=False,
        router_bias=False,
        routing=None,
        has_layer_norm=False,
        shared=None,
        has_post_norms=False,
        capacity_factor=None,
    ):
        num_experts = 5
        self.o_proj = PackedWeight.pack(torch.randn(hidden, attended), weight_format)
        self.o_bias = torch.randn(hidden) if bias else None
        self.norm = NormWeights(
            torch.randn(hidden), EPS, has_layer_norm, torch.randn(hidden) if has_layer_norm else None
        )
        self.router = PackedWeight.pack(torch.randn(num_experts, hidden), "float32")
        self.router_bias = torch.randn(num_experts) if router_bias else None
        self.choose = routing or Routing(top_k, renormalize)
        gate_up, down = torch.randn(num_experts, 2 * width, hidden), torch.randn(num_experts, hidden, width)
        of_experts = ExpertBiases(torch.randn(num_experts, 2 * width), torch.randn(num_experts, hidden))
        biases = of_experts if expert_biases else None
        self.experts = PackedExperts.pack(gate_up, down, weight_format, function=function, biases=biases)

        self.shared = None
        if shared is not None:
            rows = torch.randn(1, 2 * shared, hidden), torch.randn(1, hidden, shared)
            gate = PackedWeight.pack(torch.randn(1, hidden), "float32") if shared > 40 else None
            self.shared = stages.SharedExpert(PackedExperts.pack(*rows, weight_format, function=function), gate)

        norms = (NormWeights(torch.randn(hidden), EPS) for _ in range(2))
        self.post_norms = PostNorms(*norms) if has_post_norms else None
        # In one call, and one operation after another.
        self.capacities = [ExpertCapacity(capacity_factor) if capacity_factor else None for _ in range(2)]

    def in_one_call(self, hidden, attended):
        weights = (self.o_proj, self.o_bias, self.norm, self.router, self.choose, self.experts)
        weights += (None, None, self.router_bias, self.shared, self.post_norms, self.capacities[0])
        return stages.MoEStage(*weights)(hidden, attended)

    def one_after_another(self, hidden, attended):
        if self.post_norms is None:
            hidden = extension.linear(attended, self.o_proj, self.o_bias, hidden)
        else:
            hidden = hidden + normalise(extension.linear(attended, self.o_proj, self.o_bias), self.post_norms.attention)
        normed = normalise(hidden, self.norm)
        logits = extension.linear(normed, self.router, self.router_bias)
        ids, weights = self.choose(logits)
        if self.capacities[1] is not None:
            weights = self.capacities[1].limit(ids, weights, logits.shape[1])
        if self.shared is not None:
            experts, gate = self.shared
            scores = torch.full((len(normed), 1), 1.0)
            if gate is not None:
                _, scores = Routing(1, score="sigmoid")(extension.linear(normed, gate))
            hidden = experts.compute(normed, torch.zeros(len(normed), 1, dtype=torch.int64), scores, hidden)
        if self.post_norms is not None:
            return hidden + normalise(self.experts.compute(normed, ids, weights), self.post_norms.feed_forward)
        return self.experts.compute(normed, ids, weights, hidden)


@pytest.mark.parametrize("weight_format", MADE_FORMATS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"renormalize": False, "bias": True, "has_layer_norm": True},
        {"top_k": 5, "function": "gelu", "expert_biases": True},
        {"top_k": 1, "hidden": 64, "attended": 33},
        {"has_post_norms": True, "bias": True},
        {"shared": 24},
        {"shared": 64, "top_k": 3},
        {"capacity_factor": 0.75, "shared": 24},
        {"router_bias": True, "routing": Routing(3, score="sigmoid", choice_bias=torch.randn(5), scale=2.5)},
    ],
)
@pytest.mark.usefixtures("some_threads")
def test_all_that_follows_attention(isa, weight_format, settings):
    layer = Layer(weight_format, **settings)
    for num_tokens in (0, 1, 3, 40, 2):  # also shrinking, with what a larger pass left behind
        hidden, attended = torch.randn(num_tokens, layer.o_proj.rows), torch.randn(num_tokens, layer.o_proj.cols)
        kept = hidden.clone()
        got = layer.in_one_call(hidden, attended)
        assert torch.equal(got, layer.one_after_another(hidden, attended))
        assert torch.equal(hidden, kept)
    counts = [(it.num_choices, it.num_dropped) for it in layer.capacities if it is not None]
    assert len(set(counts)) <= 1
    assert all(num_dropped for _, num_dropped in counts)


@pytest.mark.usefixtures("some_threads")
def test_a_token_has_the_same_bits_in_any_batch(isa):
    layer = Layer("int8")
    hidden, attended = torch.randn(30, 70), torch.randn(30, 48)
    whole = layer.in_one_call(hidden, attended)
    extension.set_num_threads(1)
    alone = [layer.in_one_call(h, a) for h, a in zip(hidden.split(1), attended.split(1), strict=True)]
    assert torch.equal(torch.cat(alone), whole)


def test_what_does_not_fit_together_is_refused(needs_kernels):
    layer = Layer("float32")
    hidden, attended = torch.randn(2, 70), torch.randn(2, 48)
    with pytest.raises(ValueError, match=r"float32 \[2, 48\] is needed"):
        layer.in_one_call(hidden, attended[:1])
    with pytest.raises(ValueError, match=r"not bfloat16 \[2, 70\]"):
        layer.in_one_call(hidden.bfloat16(), attended)
    with pytest.raises(ValueError, match=r"\[70\] is needed"):
        stages.norm_linear(hidden, NormWeights(torch.ones(71), EPS), layer.router)
    layer.choose = Routing(6, renormalize=True)
    with pytest.raises(ValueError, match="6 of 5 experts cannot be chosen"):
        layer.in_one_call(hidden, attended)
