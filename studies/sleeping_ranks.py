"""Makes the ranks of this process take as long as slower devices: each sleeps before it computes.

So ranks may share cores, and other work of the machine hardly matters. Their computations and exchanges stay the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from moeflow.kernels.cpu.expert_slices import PackedExpertSlices
from moeflow.kernels.cpu.expert_slots import SlotExperts
from moeflow.models.layers.moe import MoE
from studies.asynchronous.case import Case


def sleep_as(case: Case, num_ranks: int) -> None:
    """Take the times of the case's devices, times its scale: of attention, of whole experts, and of slices."""

    def before(owner: Any, name: str, seconds: Callable[..., float]) -> None:
        compute = getattr(owner, name)

        def slowly(self: Any, *given: Any, **more: Any) -> Any:
            time.sleep(seconds(self, *given) * case.scale)
            return compute(self, *given, **more)

        setattr(owner, name, slowly)

    def whole_s(slots: Any, _: Tensor, topk_ids: Tensor, *rest: Any) -> float:
        own = topk_ids[topk_ids < slots._memory.num_experts]  # other ranks compute the others
        return case.experts_s(own.numpy().reshape(-1))

    def slices_s(topk_ids: Tensor, matrices: int) -> float:
        return case.experts_s(topk_ids.numpy().reshape(-1)) / num_ranks * matrices / 3

    before(MoE, "__call__", lambda _, hidden, *rest: case.attention_s(len(hidden)))
    before(SlotExperts, "pairs", whole_s)
    before(PackedExpertSlices, "units", lambda _, x, topk_ids: slices_s(topk_ids, 2))
    before(PackedExpertSlices, "sums", lambda _, units, topk_ids, *rest: slices_s(topk_ids, 1))
