"""The inputs of every layer in a pass, other than hidden states. An argument, never a global."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moeflow.kernels.arrays import Array
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.recurrent.state_sequences import LayerStates, PassStates, StateSequences
from moeflow.kv.storage import KVStorage


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The tokens of one pass, concatenated without padding."""

    positions: Array  # [T] int64, each token's place in its sequence
    attention: AttentionMetadata
    kv: KVStorage
    states: StateSequences | None = None  # of recurrent layers; None: there are none
    num_encoder_tokens: Sequence[int] = ()  # of each sequence of an encoder-decoder: how many of its tokens are input
    layer_inputs: Array | None = None  # [T, L, P], additional inputs of this rank's layers; None: nothing
    # Receives what each layer's experts or dense network got, [layers, T, H], and what came out of the last, [T, H].
    on_inputs: Callable[[Array, Array], None] | None = None

    def all_states(self) -> PassStates | None:
        """Return the states of all recurrent layers, and what the pass does with them; None: there are none."""
        storage, sequences = self.kv.states, self.states
        return None if storage is None or sequences is None else PassStates(storage.layers, sequences)

    def states_of(self, layer_idx: int) -> tuple[LayerStates, StateSequences]:
        """Return the same of one recurrent layer."""
        storage, sequences = self.kv.states, self.states
        assert storage is not None, "the model has no recurrent layers"
        assert sequences is not None, "nothing is said of the pass's states"
        return storage.layer(layer_idx), sequences
