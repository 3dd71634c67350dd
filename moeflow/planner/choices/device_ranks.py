"""How ranks with a device each share a model: they cut what a token reads, and add up their parts of each sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Final, cast

from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.core.offload_config import CudaDeviceConfig, EmulatedDeviceConfig
from moeflow.core.parallel_config import SLICED, WHOLE, AttentionLayout, ParallelConfig
from moeflow.kernels.weight_format import WeightFormat, cut_unit
from moeflow.parallel.blocks import head_blocks, unit_blocks
from moeflow.planner.choices.gpu_limits import why_too_few
from moeflow.planner.choices.offload_plan import OffloadOverrides
from moeflow.planner.choices.rank_limits import why_not_shared
from moeflow.planner.choices.refused_settings import SHARED_HEADS, why_refused
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.settings.settings import Settings, given_options

_EXPERTS: Final = (SLICED, WHOLE)  # slices first: all devices do the same work, whatever routers choose
_ATTENTION: Final[tuple[AttentionLayout, ...]] = ("tensor", "replicated")


def possible_device_ranks(settings: Settings, costs: ModelCosts) -> list[ParallelConfig]:
    """Return the ways devices can share a model, the fastest first. Raises: ConfigError if there is none."""
    shape = costs.shape
    experts = _layouts("--expert-layout", settings.expert_layout, _EXPERTS if shape.routing.num_experts else (WHOLE,))
    attention = _layouts("--attention-layout", settings.attention_layout, _ATTENTION)
    found, refused = [], []
    for expert_layout, attention_layout in product(experts, attention):
        parallel = ParallelConfig(
            num_ranks=settings.num_ranks or 1,
            expert_layout=expert_layout,
            attention_layout=next(it for it in _ATTENTION if it == attention_layout),
            moves_experts=False,
        )
        why_not = why_not_shared(parallel, shape) or _why_not_cut(parallel, costs)
        (refused.append(why_not) if why_not else found.append(parallel))
    if not found:
        raise ConfigError(refused[0])
    return found


def pipeline_ranks(
    settings: Settings, shape: ModelConfig, overrides: OffloadOverrides, num_gpus: int
) -> ParallelConfig:
    """Return how ranks share a model that is larger than their devices: a slice of every expert, and as many heads.

    Raises: ConfigError if they cannot.
    """
    number = settings.num_ranks or 1
    device = overrides.device
    if isinstance(device, EmulatedDeviceConfig) and not device.computes_in_torch:
        raise ConfigError(
            f"{number} ranks (--ranks) share devices that compute in torch: add it (--device {settings.device},torch)"
        )
    if isinstance(device, CudaDeviceConfig) and (reason := why_too_few(settings, num_gpus)):
        raise ConfigError(f"{reason}: use fewer (--ranks)")
    for flag, value in given_options(settings, ("expert_layout", "attention_layout")).items():
        if value not in (SLICED, "tensor"):
            raise ConfigError(f"{flag} {value} is not for devices that are smaller than the model: remove it")
    if reason := why_refused(shape, SHARED_HEADS):
        raise ConfigError(reason)
    if reason := why_not_divided(shape, number):
        raise ConfigError(
            f"{number} ranks (--ranks) cannot share layers on devices that are smaller than the model: {reason}. Use "
            "fewer"
        )
    return ParallelConfig(num_ranks=number, expert_layout=SLICED, attention_layout="tensor", moves_experts=False)


def why_not_divided(shape: ModelConfig, number: int) -> str:
    """Return why layers have no parts of one size for so many devices; empty: they have."""
    attention = shape.attention
    keys = {attention.heads_of(layer).num_kv_heads for layer in range(shape.num_layers)}
    counts = {
        "attention heads": [attention.num_heads],
        "KV heads": [count for count in keys if number % count],  # else ranks have the same ones
        "hidden units": [shape.feed_forward.intermediate_size, shape.feed_forward.dense_intermediate_size],
    }
    odd = [f"{count} {what}" for what, some in counts.items() for count in some if count % number]
    return f"{odd[0]} do not divide by {number}" if odd else ""


def fitting(candidates: Sequence[ParallelConfig], fits: Callable[[ParallelConfig], bool]) -> ParallelConfig:
    """Return the first that fits; if none does, the one that needs the least memory."""
    return next(filter(fits, candidates), candidates[0])


def _layouts(flag: str, value: str, known: Sequence[str]) -> Sequence[str]:
    found = known if value == "auto" else [layout for layout in known if layout == value]
    if not found:
        raise ConfigError(f"{flag} {value} is not for ranks on GPUs with this model: use auto or {', '.join(known)}")
    return found


def _why_not_cut(parallel: ParallelConfig, costs: ModelCosts) -> str:
    """Return why a layout cannot cut the columns of matrices; empty: it can."""
    for what, weight_format, widths in _cuts(parallel, costs):
        unit = cut_unit(weight_format)
        if any(not width or width % unit for width in widths):
            of_each = " or ".join(map(str, sorted(set(widths))))
            return (
                f"{parallel.num_ranks} ranks (--ranks) cannot have {of_each} {what} each in {weight_format}, whose "
                f"blocks have {unit}: use fewer, or another layout (--expert-layout expert, --attention-layout "
                "replicated)"
            )
    return ""


def _cuts(parallel: ParallelConfig, costs: ModelCosts) -> Iterator[tuple[str, WeightFormat, list[int]]]:
    """Yield the columns that devices cut: their name, the format of the matrix, and how many each rank has."""
    shape, layers, number = costs.shape, costs.formats.layers, parallel.num_ranks
    cuts_heads = parallel.attention_layout == "tensor"
    same = cast(WeightFormat, costs.formats.matrices)
    for layer_idx in range(shape.num_layers):
        down, shared, out = same, same, same
        if layers:
            down, shared, out = layers[layer_idx].down, layers[layer_idx].of("shared_down"), layers[layer_idx].o_proj
        if cuts_heads:
            sizes = shape.attention.heads_of(layer_idx)
            blocks = head_blocks(shape.attention.num_heads, sizes.num_kv_heads, number).queries
            yield "columns of attention's output", out, [len(block) * sizes.head_dim for block in blocks]
        if layer_idx in shape.moe_layers:
            if parallel.has_slices:
                yield "units of an expert", down, _unit_widths(shape.feed_forward.intermediate_size, number, down)
            if cuts_heads and (width := shape.feed_forward.shared_intermediate_size):
                yield "units of the shared expert", shared, _unit_widths(width, number, shared)
        elif cuts_heads:
            yield "units of a dense layer", down, _unit_widths(shape.dense_width, number, down)


def _unit_widths(width: int, number: int, weight_format: WeightFormat) -> list[int]:
    """Return the units of each rank; if they are no blocks, what each would have."""
    unit = cut_unit(weight_format)
    return [width // number] if width % unit else [len(block) for block in unit_blocks(width, number, unit)]
