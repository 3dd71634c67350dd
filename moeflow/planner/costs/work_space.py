"""The memory of a pass beyond weights, keys and values: bounds from shapes alone, compared with runs by tests.

The bound counts the live rows of the largest layer, and the logits of sampled rows. Some of these rows lie in memory
that kernels keep between passes, so only its growth is fresh.
"""

from __future__ import annotations

from moeflow.core.model_config import ModelConfig
from moeflow.core.units import KIB, MIB

_FLOAT = 4  # bytes; activations are float32 between operations
_BASE_BYTES = 8 * MIB  # the allocator's reserve, and running reads of experts
_ROW_BYTES = 4 * KIB  # of a token: positions, slots, block tables, Python's objects
_SLACK = 1.25  # freed memory that the allocator cannot reuse
_NUM_HIDDEN = 8  # rows of the hidden size: hidden states, residual, norms, results
_NUM_PAIR = 4  # rows for each token and expert: gathered, gate and up, result, the result in its place
_NUM_INPUTS = 4  # rows of all layers' own inputs: projected, normalised, from the table, their sum
_NUM_LOGITS = 4  # rows of the vocabulary's size: logits, edited, as probabilities, sorted


def work_bytes(shape: ModelConfig, *, num_tokens: int, num_sampled: int) -> int:
    """Return the most bytes of a pass over so many tokens with so many sampled rows."""
    width = max(
        shape.feed_forward.intermediate_size * (2 if shape.feed_forward.wide_layers else 1),
        shape.feed_forward.dense_intermediate_size,
        shape.feed_forward.shared_intermediate_size,
        shape.hidden_size,
    )
    attention = 3 * shape.qkv_size
    if shape.recurrent is not None:
        attention = max(attention, 3 * shape.recurrent.mixer.in_features)
    experts = max(shape.routing.top_k, 1) * _NUM_PAIR * width + 4 * shape.routing.num_experts
    inputs = (
        _NUM_INPUTS
        * shape.num_layers
        * (0 if shape.embeddings.layer_embeddings is None else shape.embeddings.layer_embeddings.size)
    )
    row_bytes = _FLOAT * (_NUM_HIDDEN * shape.hidden_size + attention + experts + inputs) + _ROW_BYTES
    return int(_BASE_BYTES + _SLACK * num_tokens * row_bytes + num_sampled * sampled_bytes(shape))


def sampled_bytes(shape: ModelConfig) -> float:
    """Return the bytes of each sampled row."""
    return _SLACK * _NUM_LOGITS * _FLOAT * shape.vocab_size


def kept_bytes(shape: ModelConfig, *, num_tokens: int) -> int:
    """Return the least part of `work_bytes` in the kernels' own memory, if all layers run in one call.

    It has queries, keys and values, attention's outputs, and the hidden units of chosen experts. The units are in the
    format of the next product, at least a byte each.
    """
    attention = (2 * shape.attention.num_heads + 2 * shape.attention.num_kv_heads) * shape.attention.head_dim
    return num_tokens * (_FLOAT * attention + shape.routing.top_k * shape.feed_forward.intermediate_size)
