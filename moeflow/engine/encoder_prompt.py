"""What a request of an encoder-decoder begins with, as one sequence: its input, and what the decoder begins with.

The input is filled up to whole KV blocks, in which the decoder's layers keep what they make of it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens before a request's output."""

    token_ids: list[int]
    num_encoder_tokens: int = 0  # the first ones, which are an encoder's input
    num_together: int = 0  # the first ones, which one pass has to compute


def encoder_prompt(input_token_ids: list[int], decoder_start_token_id: int, block_size: int) -> Prompt:
    """Return the input, what fills it up, and the decoder's first token."""
    num_filling = -len(input_token_ids) % block_size
    token_ids = [*input_token_ids, *[decoder_start_token_id] * num_filling, decoder_start_token_id]
    return Prompt(token_ids, len(input_token_ids), len(token_ids))
