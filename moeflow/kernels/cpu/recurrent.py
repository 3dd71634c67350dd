"""Operations of the CPU extension on layers that keep states: a token's bits depend on its sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moeflow.kernels.arrays import Array, address, has_whole_rows, is_float32, is_in_main_memory, row_stride
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.arguments import describe, floats
from moeflow.kernels.on_demand import torch
from moeflow.kernels.recurrent.recurrence_layer import RecurrenceInput, RecurrenceLayer
from moeflow.kernels.recurrent.recurrent_mixer import MixerHeads, RecurrentMixer
from moeflow.kernels.recurrent.state_sequences import LayerStates, StateSequences

if TYPE_CHECKING:
    from torch import Tensor

_AVAILABLE = extension.is_available()
if _AVAILABLE:
    import moeflow.kernels._cpu as _cpu


def accepts(x: Any) -> bool:
    """Return whether these operations can be used for rows, which may be parts of longer ones."""
    return _AVAILABLE and is_in_main_memory(x) and is_float32(x) and has_whole_rows(x)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: LayerStates,
    sequences: StateSequences,
    *,
    gates: tuple[Tensor, Tensor] | None,
    has_silu: bool,
) -> Tensor:
    """Compute `kernels.recurrent.short_conv`."""
    num_tokens, num_channels = x.shape
    if len(weight) != num_channels:
        raise ValueError(f"{describe(weight)} cannot convolve {describe(x)}")
    for gate in gates or ():
        if gate.shape != x.shape or row_stride(gate) != row_stride(x) or not accepts(gate):
            raise ValueError(f"{describe(gate)} cannot gate {describe(x)}")
    out = x.new_empty(num_tokens, num_channels)
    _cpu.short_conv(
        layer=_bind_conv(weight, bias, has_silu=has_silu),
        x=address(x),
        in_gate=address(gates[0]) if gates else 0,
        out_gate=address(gates[1]) if gates else 0,
        x_stride=row_stride(x),
        **_states(states, sequences),
        out=address(out),
    )
    return out


def recurrence(
    layer: RecurrenceLayer, given: RecurrenceInput, states: LayerStates, sequences: StateSequences
) -> Tensor:
    """Compute `kernels.recurrent.recurrence`."""
    num_tokens = given.values.shape[0]
    of_keys = (num_tokens, layer.num_key_heads * layer.key_dim)
    _check_parts(
        (given.queries, of_keys), (given.keys, of_keys), (given.values, (num_tokens, layer.num_heads * layer.value_dim))
    )
    gates = [given.steps] if given.rates is None else [given.steps, given.rates]
    _check_parts(*((gate, (num_tokens, layer.num_heads)) for gate in gates))
    out = given.values.new_empty(num_tokens, layer.num_heads * layer.value_dim)
    _cpu.recurrence(
        layer=_bind_heads(layer),
        queries=address(given.queries),
        keys=address(given.keys),
        values=address(given.values),
        row_stride=row_stride(given.values),
        steps=address(given.steps),
        rates=address(given.rates),
        gate_stride=row_stride(given.steps),
        num_tokens=num_tokens,
        **_states(states, sequences),
        out=address(out),
    )
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, is_gated_first: bool) -> Tensor:
    """Compute `kernels.recurrent.gates.gated_norm`."""
    num_weights, size = weight.shape
    _check_parts((gate, tuple(x.shape)))
    num_groups = x.shape[1] // size
    if num_groups * size != x.shape[1] or num_weights not in (1, num_groups):
        raise ValueError(f"{describe(x)} cannot be normalised with {describe(weight)}")
    out = torch.empty_like(x)
    _cpu.gated_norm(
        layer=_bind_norm(weight, eps, is_gated_first=is_gated_first),
        x=floats(x, *x.shape),
        gate=address(gate),
        rows_per_gate=num_groups,
        gate_stride=row_stride(gate),
        num_rows=x.shape[0] * num_groups,
        out=address(out),
    )
    return out


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Compute `kernels.recurrent.gates.sigmoid_gate`."""
    _check_parts((gate, tuple(x.shape)))
    out = torch.empty_like(x)
    _cpu.sigmoid_gate(
        x=floats(x, *x.shape),
        gate=address(gate),
        gate_stride=row_stride(gate),
        num_rows=x.shape[0],
        size=x.shape[1],
        out=address(out),
    )
    return out


def bind_mixer(mixer: RecurrentMixer) -> object:
    """Return a mixer for the extension, which looks at the memory of its weights. Raises: ValueError."""
    size, gates_at, heads = mixer.num_channels, mixer.conv_gates_at or (), mixer.heads
    _check_places(mixer.in_size, size, (mixer.conv_at, *gates_at))
    arguments: dict[str, Any] = dict.fromkeys(("queries_at", "keys_at", "values_at", "steps_at", "norm_gates_at"), 0)
    arguments |= {"recurrence": None, "norm": None, "rates_at": -1}
    if heads is not None:
        arguments = _bind_mixer_heads(mixer, heads)
    return _cpu.RecurrentMixer(
        conv=_bind_conv(mixer.conv_weight, mixer.conv_bias, has_silu=mixer.has_silu),
        conv_at=mixer.conv_at,
        in_gate_at=gates_at[0] if gates_at else -1,
        out_gate_at=gates_at[1] if gates_at else -1,
        **arguments,
    )


def _bind_mixer_heads(mixer: RecurrentMixer, heads: MixerHeads) -> dict[str, Any]:
    layer, (num_weights, size) = heads.layer, heads.norm.shape
    _check_places(mixer.num_channels, layer.num_key_heads * layer.key_dim, (heads.queries_at, heads.keys_at))
    _check_places(mixer.num_channels, heads.out_size, (heads.values_at,))
    _check_places(mixer.in_size, heads.out_size, (heads.norm_gates_at,))
    steps_and_rates = (heads.steps_at,) if heads.rates_at is None else (heads.steps_at, heads.rates_at)
    _check_places(mixer.in_size, layer.num_heads, steps_and_rates)
    if heads.out_size % size or num_weights not in (1, heads.out_size // size):
        raise ValueError(f"rows of {heads.out_size} values cannot be normalised with {describe(heads.norm)}")
    return {
        "recurrence": _bind_heads(layer),
        "queries_at": heads.queries_at,
        "keys_at": heads.keys_at,
        "values_at": heads.values_at,
        "steps_at": heads.steps_at,
        "rates_at": -1 if heads.rates_at is None else heads.rates_at,
        "norm": _bind_norm(heads.norm, heads.norm_eps, is_gated_first=heads.is_gated_first),
        "norm_gates_at": heads.norm_gates_at,
    }


def _check_places(size: int, count: int, places: Sequence[int]) -> None:
    """Raise ValueError unless so many values lie at each place of rows of a size."""
    for place in places:
        if not 0 <= place <= size - count:
            raise ValueError(f"{count} values from {place} on are not in rows of {size}")


def _bind_conv(weight: Array, bias: Array | None, *, has_silu: bool) -> object:
    num_channels, num_taps = weight.shape
    if not 1 <= num_taps <= _cpu.max_taps:
        raise ValueError(f"a convolution has up to {_cpu.max_taps} taps, not {num_taps}")
    return _cpu.ShortConv(
        weight=floats(weight, num_channels, num_taps),
        bias=floats(bias, num_channels),
        num_channels=num_channels,
        num_taps=num_taps,
        has_silu=has_silu,
    )


def _bind_heads(layer: RecurrenceLayer) -> object:
    if layer.key_dim > _cpu.max_key_dim:
        raise ValueError(f"keys have up to {_cpu.max_key_dim} dimensions, not {layer.key_dim}")
    return _cpu.Recurrence(
        step_bias=floats(layer.step_bias, layer.num_heads),
        log_decay=floats(layer.log_decay, layer.num_heads),
        skip=floats(layer.skip, layer.num_heads),
        least_step=layer.least_step,
        most_step=layer.most_step,
        num_heads=layer.num_heads,
        num_key_heads=layer.num_key_heads,
        key_dim=layer.key_dim,
        value_dim=layer.value_dim,
        is_delta=layer.is_delta,
        takes_turns=layer.key_heads_take_turns,
        norm_eps=-1.0 if layer.norm_eps is None else layer.norm_eps,
        query_scale=layer.query_scale,
    )


def _bind_norm(weight: Array, eps: float, *, is_gated_first: bool) -> object:
    num_weights, size = weight.shape
    data = floats(weight, num_weights, size)
    return _cpu.GatedNorm(weight=data, num_weights=num_weights, eps=eps, size=size, is_gated_first=is_gated_first)


def _check_parts(*parts: tuple[Tensor, tuple[int, ...]]) -> None:
    """Raise ValueError unless these are float32 of such shapes, all of rows of one length."""
    stride = row_stride(parts[0][0])
    for part, shape in parts:
        if tuple(part.shape) != shape or not accepts(part) or row_stride(part) != stride:
            raise ValueError(f"float32 {list(shape)} of rows {stride} apart is needed, not {describe(part)}")


def _states(states: LayerStates, sequences: StateSequences) -> dict[str, Any]:
    """Return the arguments for the places of states."""
    return {
        "slots": floats(states.slots, *states.slots.shape),
        "slot_floats": states.slots.shape[1],
        "offset": states.offset,
        "num_sequences": len(sequences),
        "sequences": address(sequences.table),
    }
