"""Which experts a token goes to, given its router's scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from moeflow.kernels.arrays import Array, address
from moeflow.kernels.cpu import row_ops
from moeflow.kernels.cpu.arguments import floats
from moeflow.kernels.on_demand import on_demand, torch
from moeflow.kernels.triton import launching

if TYPE_CHECKING:
    from torch import Tensor

with on_demand(__name__):
    from moeflow.kernels import sparsemixer
    from moeflow.kernels.triton import routing as triton_routing

Score = Literal["softmax", "sigmoid", "sparsemixer"]
GroupScore = Literal["max", "top2_sum"]
SCORES: Final[tuple[Score, ...]] = ("softmax", "sigmoid", "sparsemixer")  # in the order of the kernels' numbers
GROUP_SCORES: Final[tuple[GroupScore, ...]] = ("max", "top2_sum")  # likewise


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """How most families choose experts. As data, so that a kernel may do it on the way.

    Each expert has a score: its logit's share under a softmax over all experts, or the logit's sigmoid. Experts are
    ranked by score plus `choice_bias`, of equals the lower number first. With `num_groups` groups of neighbours, only
    the `num_chosen_groups` best groups are candidates. A group's score is that of its best expert, or the sum of its
    two best.
    The weight of a chosen expert is its score without the bias. With `renormalize` it is divided by the sum of chosen
    scores plus `epsilon`, at least `min_total`. Then it is multiplied by `scale` and by the expert's entry of
    `expert_scales`.

    SparseMixer scores each expert against experts that are not much worse. It has neither bias nor groups.

    Each token also goes to `num_shared` shared experts, numbered after the others. Their weight is 1, or with
    `has_shared_gate` the sigmoid of a last logit, after those of the other experts.

    (A softmax over the chosen experts alone is that over all, renormalised.)
    """

    top_k: int
    renormalize: bool = False
    score: Score = "softmax"
    choice_bias: Array | None = None  # [E] float32, on the device of the logits
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: GroupScore = "max"
    epsilon: float = 0.0
    min_total: float = 0.0
    scale: float = 1.0
    expert_scales: Array | None = None  # [E] float32, likewise
    jitter: float = 0.0  # of SparseMixer: half of how much worse others may be, see `sparsemixer`
    num_shared: int = 0  # not for the CPU kernels
    has_shared_gate: bool = False
    handle: Any = field(init=False, repr=False)  # for kernels, which look at the bias; None without the extension

    def __post_init__(self) -> None:
        bias, scales = self.choice_bias, self.expert_scales
        handle = row_ops.bind_routing(
            top_k=self.top_k,
            renormalize=self.renormalize,
            score=SCORES.index(self.score),
            choice_bias=0 if bias is None or not row_ops.accepts(bias) else address(bias),
            num_groups=self.num_groups,
            num_chosen_groups=self.num_chosen_groups,
            group_score=GROUP_SCORES.index(self.group_score),
            epsilon=self.epsilon,
            min_total=self.min_total,
            scale=self.scale,
            expert_scales=0 if scales is None or not row_ops.accepts(scales) else address(scales),
            jitter=self.jitter,
        )
        object.__setattr__(self, "handle", handle)

    def __call__(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's experts, best first, and their weights, computed in float32.

        Shapes: router_logits [T, E], or with a gate [T, E + 1] -> topk_ids [T, K + shared experts] int64, topk_weights
        likewise float32.
        """
        num_experts = router_logits.shape[1] - self.has_shared_gate
        self.check(num_experts)
        if row_ops.accepts(router_logits) and self.num_shared == 0:
            return row_ops.route(router_logits, self.top_k, self.handle)
        if launching.accepts(router_logits):
            return triton_routing.route(router_logits, self)
        logits = (router_logits[:, :num_experts] if self.has_shared_gate else router_logits).float()
        if self.score == "sparsemixer":
            topk_ids, topk_weights = sparsemixer.sparsemixer(logits, self.top_k, self.jitter)
        else:
            topk_ids, topk_weights = self._best_of(logits)
        topk_weights = topk_weights * self.scale
        if self.expert_scales is not None:
            topk_weights = topk_weights * self.expert_scales.expand(logits.shape).gather(1, topk_ids)
        if self.num_shared == 0:
            return topk_ids, topk_weights
        shared = torch.arange(num_experts, num_experts + self.num_shared, device=logits.device)
        shares = logits.new_ones(len(logits), 1)
        if self.has_shared_gate:
            shares = torch.sigmoid(router_logits[:, num_experts:].float())
        return (
            torch.cat([topk_ids, shared.expand(len(logits), -1)], dim=1),
            torch.cat([topk_weights, shares.expand(-1, self.num_shared)], dim=1),
        )

    def _best_of(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the best experts by one score of each, and their weights but for scales."""
        scores = torch.softmax(logits, dim=-1) if self.score == "softmax" else torch.sigmoid(logits)
        topk_ids = _best(self._ranks(logits, scores), self.top_k)
        topk_weights = scores.gather(1, topk_ids)
        if self.renormalize:
            total = topk_weights.sum(dim=-1, keepdim=True) + self.epsilon
            topk_weights = topk_weights / total.clamp(min=self.min_total)
        return topk_ids, topk_weights

    def check(self, num_experts: int) -> None:
        """Raise ValueError unless so many experts can be chosen among."""
        groups, most = self.num_groups, row_ops.MAX_GROUPS
        if not 1 <= groups <= most or num_experts % groups or not 1 <= self.num_chosen_groups <= groups:
            raise ValueError(
                f"{num_experts} experts cannot form {groups} groups with {self.num_chosen_groups} chosen ones"
            )
        size = num_experts // groups
        if size < 2 and groups > 1 and self.group_score == "top2_sum":
            raise ValueError(f"groups of {size} have no two experts")
        num_candidates = size * self.num_chosen_groups
        if not 1 <= self.top_k <= num_candidates:
            raise ValueError(f"{self.top_k} of {num_candidates} experts cannot be chosen")
        if self.score == "sparsemixer" and (self.renormalize or self.choice_bias is not None or groups > 1):
            raise ValueError("SparseMixer's weights are not renormalised, and it has neither a bias nor groups")
        for of_experts in (self.choice_bias, self.expert_scales):
            if of_experts is not None and row_ops.accepts(of_experts):
                floats(of_experts, num_experts)

    def _ranks(self, logits: Tensor, scores: Tensor) -> Tensor:
        """Return what experts are ranked by: logits, where that is the order of scores, for they are finer."""
        by_logits = self.choice_bias is None and (self.num_groups == 1 or self.group_score == "max")
        ranks = logits if by_logits else scores if self.choice_bias is None else scores + self.choice_bias
        if self.num_groups == 1:
            return ranks
        grouped = ranks.view(len(ranks), self.num_groups, ranks.shape[1] // self.num_groups)
        of_groups = grouped.topk(1 if self.group_score == "max" else 2, dim=-1).values.sum(dim=-1)
        is_left_out = torch.ones_like(of_groups, dtype=torch.bool)
        is_left_out.scatter_(1, _best(of_groups, self.num_chosen_groups), False)
        return grouped.masked_fill(is_left_out.unsqueeze(-1), -torch.inf).view(ranks.shape)


def _best(ranks: Tensor, count: int) -> Tensor:
    """Return the places of the largest numbers of each row, of equals the first: [T, count] int64."""
    return ranks.sort(dim=-1, descending=True, stable=True).indices[:, :count]
