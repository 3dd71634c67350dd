"""Stages of a decoder layer by the CPU extension, several operations in one call: a pass of one token is then mostly
kernels. The results are those of the operations one after another, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from moeflow.kernels.arrays import Array, address, dtype_name, floats_like
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.arguments import floats
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.cpu.packed_weight import PackedWeight
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.norm import ExpertNorms, NormWeights, PostNorms
from moeflow.kernels.routing import Routing

if TYPE_CHECKING:
    from moeflow.kernels.capacity import ExpertCapacity

if extension.is_available():
    import moeflow.kernels._cpu as _cpu


def bind_norm(norm: NormWeights, size: int) -> object:
    """Return a norm of rows of that size for the extension, which looks at the memory of its weights.

    Raises: ValueError if it is for others.
    """
    weight, bias = floats(norm.weight, size), floats(norm.bias, size)
    return _cpu.Norm(weight=weight, eps=norm.eps, subtracts_mean=norm.subtracts_mean, bias=bias)


def norm_linear(x: Array, norm: NormWeights, weight: PackedWeight, bias: Array | None = None) -> Array:
    """Return `normalise(x, norm) @ weight.T + bias`. Shapes: x [T, H], bias [N] -> [T, N], all float32."""
    num_tokens = x.shape[0]
    out = floats_like(x, num_tokens, weight.rows)
    _cpu.linear(
        weight=weight.handle,
        x=floats(x, num_tokens, weight.cols),
        num_rows=num_tokens,
        x_stride=weight.cols,
        bias=floats(bias, weight.rows),
        residual=0,
        out=address(out),
        norm=floats(norm.weight, weight.cols),
        eps=norm.eps,
        subtracts_mean=norm.subtracts_mean,
        norm_bias=floats(norm.bias, weight.cols),
    )
    return out


class SharedExpert(NamedTuple):
    """An expert that all tokens go to besides: the one that there is."""

    experts: PackedExperts
    gate: PackedWeight | None = None  # it weighs the sigmoid of what this says, [1, H]; None: 1


@dataclass(frozen=True, slots=True)
class MoEStage:
    """All that follows attention in a layer of experts, or without a router in a dense one.

    That is `h + experts(norm(h))`, a shared expert added first, with `h = hidden + attended @ o_proj.T + o_bias`.
    """

    o_proj: PackedWeight
    o_bias: Array | None  # [H]
    norm: NormWeights
    router: PackedWeight | None  # None: every token goes to the one expert there is
    choose: Routing
    experts: PackedExperts
    # [E] int32, where each expert is among `experts`, or that it is not there: `PackedDecoder` can do without some.
    # None: all are there, in order.
    slots: Array | None = None
    biases: ExpertBiases | None = None  # of the layer's experts
    router_bias: Array | None = None  # [E]
    shared: SharedExpert | None = None
    post_norms: PostNorms | None = None  # with a shared expert only where experts have norms
    capacity: ExpertCapacity | None = None  # None: experts take all tokens that choose them
    handle: Any = field(init=False, repr=False, compare=False)  # looks at the memory of all of these

    def __post_init__(self) -> None:
        size, router, num_experts = self.o_proj.rows, self.router, self.num_experts
        fits = self.experts.hidden == size
        if self.slots is None:
            fits &= self.experts.num_experts == num_experts
        else:
            fits &= (
                dtype_name(self.slots.dtype) == "int32" and self.slots.shape == (num_experts,) and router is not None
            )
        fits &= router is None or router.cols == size
        if not fits:
            raise ValueError(f"{self.o_proj}, {router} and {self.experts} do not match")
        self.choose.check(num_experts)
        self._check_shared()
        self._check_norms()
        object.__setattr__(self, "handle", self._bind())

    def _check_shared(self) -> None:
        if self.shared is None:
            return
        (experts, gate), size = self.shared, self.o_proj.rows
        if (experts.num_experts, experts.hidden) != (1, size) or (gate and (gate.rows, gate.cols) != (1, size)):
            raise ValueError(f"{experts} and {gate} are no shared expert of rows of {size} values")

    def _check_norms(self) -> None:
        if self.post_norms is None:
            return
        norms = self.post_norms.experts
        if norms is None:
            if self.shared is not None:
                raise ValueError("what a shared expert returns is normalised by norms of experts")
            return
        if self.router is None or self.shared is None or self.shared.gate is not None:
            raise ValueError("norms of experts are for a router beside a shared expert that is not gated")

    @property
    def num_experts(self) -> int:
        """How many the router chooses among."""
        return 1 if self.router is None else self.router.rows

    def __call__(self, hidden: Array, attended: Array) -> Array:
        """Shapes: hidden [T, H], attended [T, o_proj.cols], both float32 -> [T, H]. All experts must be there."""
        assert self.slots is None
        o_proj = self.o_proj
        num_tokens = hidden.shape[0]
        out = floats_like(hidden, num_tokens, o_proj.rows)
        _cpu.moe_stage(
            stage=self.handle,
            attended=floats(attended, num_tokens, o_proj.cols),
            hidden=floats(hidden, num_tokens, o_proj.rows),
            num_tokens=num_tokens,
            out=address(out),
        )
        return out

    def _bind(self) -> object:
        layer = self.experts.handle
        if self.slots is not None:
            layer = self.experts.in_slots(address(self.slots), self.num_experts, self.biases)
        size = self.o_proj.rows
        post = self.post_norms
        return _cpu.MoEStage(
            o_proj=self.o_proj.handle,
            router=None if self.router is None else self.router.handle,
            layer=layer,
            routing=self.choose.handle,
            o_bias=floats(self.o_bias, size),
            norm=bind_norm(self.norm, size),
            router_bias=floats(self.router_bias, self.num_experts),
            shared=None if self.shared is None else self.shared.experts.handle,
            shared_gate=None if self.shared is None or self.shared.gate is None else self.shared.gate.handle,
            attention_norm=None if post is None else bind_norm(post.attention, size),
            experts_norm=None if post is None else bind_norm(post.feed_forward, size),
            normed_experts=None if post is None or post.experts is None else _bind_expert_norms(post.experts, size),
            out_scale=0 if post is None else floats(post.scale, 1),
            capacity=None if self.capacity is None else self.capacity.handle,
        )


def _bind_expert_norms(norms: ExpertNorms, size: int) -> object:
    return _cpu.NormedExperts(
        router_weights=floats(norms.router_weights, size),
        shared_weights=floats(norms.shared_weights, size),
        chosen_weights=floats(norms.chosen_weights, size),
        router_scale=norms.router_scale,
        shared_norm=bind_norm(norms.shared, size),
        chosen_norm=bind_norm(norms.chosen, size),
    )
