"""What a request begins with, as one sequence. In an encoder-decoder: its input, and what the decoder begins with.

The input is padded to whole KV blocks, where the decoder's layers keep its keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moeflow.core.engine_messages import ModelInfo
from moeflow.core.errors import RequestError
from moeflow.core.sampling_params import SamplingParams


class EncoderPrompt(msgspec.Struct, frozen=True):
    """The tokens before a request's output."""

    token_ids: Sequence[int]
    num_encoder_tokens: int = 0  # the first ones, which are an encoder's input
    num_together: int = 0  # the first ones, which one pass has to compute


def prompt_of(model: ModelInfo, token_ids: Sequence[int], *, is_pooled: bool = False) -> EncoderPrompt:
    """Return what a request with these tokens begins with; `is_pooled`: its prompt becomes a vector, and no more."""
    encoder = model.encoder
    if encoder is None:
        return EncoderPrompt(token_ids)
    if is_pooled:
        return EncoderPrompt(token_ids, len(token_ids), len(token_ids))
    num_filling = -len(token_ids) % encoder.block_size
    whole = [*token_ids, *[encoder.decoder_start_token_id] * (num_filling + 1)]
    return EncoderPrompt(whole, len(token_ids), len(whole))


def check_input(model: ModelInfo, token_ids: Sequence[int], params: SamplingParams) -> None:
    """Raise RequestError for what an encoder cannot take."""
    if model.encoder is None:
        return
    most = model.encoder.max_input_tokens
    if len(token_ids) > most:
        raise RequestError(
            f"the input has {len(token_ids)} tokens, and the encoder takes {most} at once: shorten it, or have the "
            "server take more in one pass (--max-num-batched-tokens)",
            param="prompt",
        )
    if params.prompt_logprobs is not None:
        raise RequestError("an encoder's input has no log-probabilities", param="prompt_logprobs")
