"""Linear recurrences against transformers' models of them, in passes that are cut in any way."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from moeflow.kernels.recurrent.gates import gated_norm, sigmoid_gate
from moeflow.kernels.recurrent.recurrence import recurrence
from moeflow.kernels.recurrent.recurrence_layer import RecurrenceInput, RecurrenceLayer
from tests.kernels.recurrent.passes import LENGTHS, alone, mixed, rows_of

HEADS, KEY_HEADS = 4, 2
SIZES = pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (12, 20), (64, 5)])
KINDS = pytest.mark.parametrize("is_delta", [False, True])


class Layer:
    """Random inputs and weights of a layer's recurrence."""

    def __init__(
        self,
        is_delta: bool,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype = torch.float32,
        *,
        takes_turns: bool = False,
    ) -> None:
        torch.manual_seed(key_dim)
        self.sizes = [KEY_HEADS * key_dim, KEY_HEADS * key_dim, HEADS * value_dim, HEADS, HEADS]
        self.inputs = torch.randn(sum(LENGTHS), sum(self.sizes)).to(dtype)
        self.layer = RecurrenceLayer(
            num_heads=HEADS,
            num_key_heads=KEY_HEADS,
            key_dim=key_dim,
            value_dim=value_dim,
            step_bias=torch.randn(HEADS),
            log_decay=torch.randn(HEADS),
            skip=None if is_delta else torch.randn(HEADS),
            is_delta=is_delta,
            norm_eps=1e-6 if is_delta else None,
            query_scale=key_dim**-0.5 if is_delta else 1.0,
            key_heads_take_turns=takes_turns,
        )

    def run(self, rows, states, sequences):
        *qkv, steps, rates = rows.split(self.sizes, dim=1)
        given = RecurrenceInput(*qkv, steps, rates if self.layer.is_delta else None)
        return recurrence(self.layer, given, states, sequences)

    def expected(self) -> torch.Tensor:
        of_each = (self._theirs(self.inputs[list(rows_of(number))].float()) for number in range(len(LENGTHS)))
        return torch.cat(list(of_each))

    def _theirs(self, rows):
        layer = self.layer
        queries, keys, values, steps, rates = (part[None] for part in rows.split(self.sizes, dim=1))
        queries, keys = (part.unflatten(-1, (KEY_HEADS, layer.key_dim)) for part in (queries, keys))
        if layer.key_heads_take_turns:  # theirs share with neighbours: with a key each, no head shares
            queries, keys = (part.repeat(1, 1, HEADS // KEY_HEADS, 1) for part in (queries, keys))
        values = values.unflatten(-1, (HEADS, layer.value_dim))
        decay = -layer.log_decay.exp()
        if layer.is_delta:
            found, _ = torch_chunk_gated_delta_rule(
                queries,
                keys,
                values,
                g=decay * functional.softplus(steps + layer.step_bias),
                beta=rates.sigmoid(),
                use_qk_l2norm_in_kernel=True,
            )
        else:
            found = mamba2_chunk_scan(
                values,
                steps,
                decay,
                keys,
                queries,
                chunk_size=8,
                D=layer.skip,
                dt_bias=layer.step_bias,
                dt_softplus=True,
            )
        return found.reshape(rows.shape[0], -1)


@KINDS
@SIZES
def test_it_is_what_transformers_computes_in_chunks(isa, is_delta, key_dim, value_dim):
    it = Layer(is_delta, key_dim, value_dim)
    found = mixed(it.run, it.inputs, it.layer.state_values)
    torch.testing.assert_close(found, it.expected(), atol=1e-4, rtol=1e-4)


@KINDS
def test_key_heads_may_take_turns(isa, is_delta):
    it = Layer(is_delta, 12, 20, takes_turns=True)
    found = mixed(it.run, it.inputs, it.layer.state_values)
    torch.testing.assert_close(found, it.expected(), atol=1e-4, rtol=1e-4)
    rounded = Layer(is_delta, 12, 20, torch.bfloat16, takes_turns=True)
    in_torch = mixed(rounded.run, rounded.inputs, rounded.layer.state_values)
    torch.testing.assert_close(in_torch.float(), rounded.expected(), atol=0.05, rtol=0.05)


@KINDS
@SIZES
def test_a_tokens_bits_depend_on_its_sequence_alone(isa, is_delta, key_dim, value_dim):
    it = Layer(is_delta, key_dim, value_dim)
    size = it.layer.state_values
    assert torch.equal(mixed(it.run, it.inputs, size), alone(it.run, it.inputs, size))


@KINDS
def test_without_kernels_it_is_the_same(is_delta):
    it = Layer(is_delta, 12, 20, torch.bfloat16)
    found = mixed(it.run, it.inputs, it.layer.state_values)
    torch.testing.assert_close(found.float(), it.expected(), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("is_gated_first", [False, True])
@pytest.mark.parametrize("num_weights", [1, 3])
def test_norms_with_gates(isa, is_gated_first, num_weights):
    torch.manual_seed(3)
    x, gates, weight = torch.randn(5, 3 * 20), torch.randn(5, 70), torch.randn(num_weights, 20)
    gate = gates[:, 4:64]

    def expected():
        wide, share = x.double().unflatten(1, (3, 20)), functional.silu(gate.double()).unflatten(1, (3, 20))
        wide = wide * share if is_gated_first else wide
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
        return (normed if is_gated_first else normed * share).flatten(1)

    found = gated_norm(x, gate, weight, 1e-5, is_gated_first=is_gated_first)
    torch.testing.assert_close(found.double(), expected(), atol=1e-5, rtol=1e-5)
    plain = gated_norm(x.bfloat16(), gate.bfloat16(), weight, 1e-5, is_gated_first=is_gated_first)
    torch.testing.assert_close(plain.double(), expected(), atol=0.1, rtol=0.05)
    one = gated_norm(x[2:3], gates[2:3, 4:64], weight, 1e-5, is_gated_first=is_gated_first)
    assert torch.equal(found[2:3], one)


def test_sigmoid_gates(isa):
    torch.manual_seed(4)
    x, gates = torch.randn(5, 37), torch.randn(5, 50)
    found = sigmoid_gate(x, gates[:, 9:46])
    torch.testing.assert_close(found, x * gates[:, 9:46].sigmoid(), atol=1e-6, rtol=1e-5)
    assert torch.equal(found[3:4], sigmoid_gate(x[3:4], gates[3:4, 9:46]))


@pytest.mark.parametrize("is_gated_first", [False, True])
def test_a_gated_norm_makes_its_tensors_on_the_device_of_its_input(is_gated_first: bool) -> None:
    devices = set()

    class Devices(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            devices.add(result.device.type)
            return result

    x, gate, weight = (torch.empty(shape, device="meta") for shape in ((3, 8), (3, 8), (2, 4)))
    with Devices():
        gated_norm(x, gate, weight, 1e-6, is_gated_first=is_gated_first)
    assert devices == {"meta"}
