"""How a model that is larger than its GPU runs there: some experts on the GPU, all others on the CPU."""

from __future__ import annotations

import msgspec


class HybridConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of a hybrid model. All other weights are on the GPU."""

    num_gpu_experts: int  # slots of a layer on the GPU; 0: the CPU computes all experts
    cpu_weight_format: str  # of the experts that the CPU computes: a `WeightFormat`
    cpu_isa: str  # instruction set of the kernels that compute them
    stream_tokens: int  # a pass of as many tokens copies experts to the GPU; 0: none does
    popularity_file: str = ""  # how often each expert was chosen; empty: unknown at the start
