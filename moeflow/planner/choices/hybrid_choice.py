"""How a GPU that is smaller than the model shares its experts with the CPU, and whether that is faster than the CPU."""

from __future__ import annotations

from typing import NamedTuple

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.core.hybrid_config import HybridConfig
from moeflow.core.model_config import ModelConfig
from moeflow.core.offload_config import CUDA, parse_cuda_device
from moeflow.core.plan import Forecast, Workload
from moeflow.kernels.packed_bands import FORMATS as MOVABLE_FORMATS
from moeflow.kernels.weight_format import WeightFormat
from moeflow.planner.choices.device_weights import stored_formats
from moeflow.planner.choices.weight_choice import WeightChoice
from moeflow.planner.costs.hybrid_costs import HybridCosts
from moeflow.planner.usage import Usage
from moeflow.settings.settings import Settings


def can_be_hybrid(settings: Settings, shape: ModelConfig, weights: WeightChoice) -> bool:
    """Return whether the CPU may compute experts of a model beside a GPU; not where the user asks for a pipeline.

    Experts in the blocks of a file have no way from the CPU's layout to the GPU's.
    """
    if weights.layers or weights.matrices not in (*MOVABLE_FORMATS, "float16"):
        return False
    is_cuda = settings.device.split(":")[0] == CUDA
    names_memory = is_cuda and parse_cuda_device(settings.device)[1] is not None
    asked = (settings.pipeline, settings.micro_batch, settings.resident_experts)
    return bool(shape.routing.num_experts) and not names_memory and asked == (None, None, None)


def host_format(weights: WeightChoice, checkpoint: Checkpoint | None) -> WeightFormat:
    """Return the format in which the CPU holds the experts that a GPU holds in `weights`: of the same values.

    The CPU has no kernels for float16. A checkpoint in bfloat16 stays so, and any other becomes float32.
    """
    if weights.matrices != "float16":
        return weights.matrices
    is_narrow = checkpoint is None or stored_formats(checkpoint) <= {"bfloat16"}
    return "bfloat16" if is_narrow else "float32"


def hybrid_config(model: HybridCosts, num_gpu_experts: int, *, cpu_isa: str, max_tokens: int) -> HybridConfig:
    """Return the configuration for passes over so many tokens at most."""
    return HybridConfig(
        num_gpu_experts=num_gpu_experts,
        cpu_weight_format=model.host_format,
        cpu_isa=cpu_isa,
        stream_tokens=model.stream_tokens(num_gpu_experts, max_tokens),
    )


class Compared(NamedTuple):
    """What a model brings on a GPU that is too small for it, and on the CPU alone, in tokens a second."""

    hybrid: float
    cpu: float

    @classmethod
    def of(cls, hybrid: Forecast, cpu: Forecast, usage: Usage) -> Compared:
        """Compare what the usage asks for: one request where people wait, else all together."""
        if usage.goal == "latency" or usage.is_interactive:
            return cls(*(_alone_tokens_per_s(it, usage.workload) for it in (hybrid, cpu)))
        return cls(hybrid.tokens_per_s.value, cpu.tokens_per_s.value)

    @property
    def is_worth(self) -> bool:
        """Whether the GPU helps."""
        return self.hybrid > self.cpu

    def reason(self, gpu: str) -> tuple[str, str]:
        """Return the decision on the device, with both figures."""
        if self.is_worth:
            how = f"{gpu}: smaller than the model, so the CPU computes some experts"
            return "device", f"{how}: {self.hybrid:.3g} tokens/s expected, {self.cpu:.3g} on the CPU alone"
        how = f"cpu: {gpu} is smaller than the model, and sharing experts with it does not help"
        return "device", f"{how}: {self.cpu:.3g} tokens/s expected, {self.hybrid:.3g} with {gpu}"


def _alone_tokens_per_s(forecast: Forecast, workload: Workload) -> float:
    """Return the tokens a second of one request, its prompt included."""
    decode_s = (workload.gen_len - 1) / forecast.decode_alone_tokens_per_s.value
    return workload.gen_len / (forecast.time_to_first_token_s.value + decode_s)
