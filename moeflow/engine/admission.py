"""From a prompt and sampling parameters to what an engine is given: checks, and one submission a completion.

Shared by the asyncio and the offline API. Checks here what can be known before the engine sees a request, so
that the caller gets an error at once. Knows nothing of when or where the engine runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from moeflow.core.engine_messages import ModelInfo, Submission
from moeflow.core.errors import RequestError
from moeflow.core.pooling_params import PoolingParams
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.token_choice import TokenChoice
from moeflow.engine.encoder_prompt import check_input, prompt_of
from moeflow.engine.pooling_choice import check_generates
from moeflow.engine.random_numbers import child_seed
from moeflow.text.tokenizer import Tokenizer


def encode_prompt(tokenizer: Tokenizer, prompt: str | Sequence[int], *, max_tokens: int | None = None) -> list[int]:
    """Return a prompt's tokens: text is encoded as the model expects a prompt to begin, token ids are kept.

    Raises: RequestError if the prompt is empty or neither text nor token ids; ContextLengthError if it is a text so
    long that it must have more than `max_tokens` tokens.
    """
    token_ids = tokenizer.encode(prompt, max_tokens=max_tokens) if isinstance(prompt, str) else _as_token_ids(prompt)
    if not token_ids:
        raise RequestError("the prompt is empty", param="prompt")
    return token_ids


def cut_prompt(tokenizer: Tokenizer, token_ids: list[int], max_tokens: int) -> list[int]:
    """Return a prompt's first tokens, so many at most. A special token at its end stays there: models look for it."""
    if len(token_ids) <= max_tokens:
        return token_ids
    num_ends = 1 if token_ids[-1] in tokenizer.special_token_ids and max_tokens > 1 else 0
    return [*token_ids[: max_tokens - num_ends], *token_ids[len(token_ids) - num_ends :]]


def _as_token_ids(prompt: object) -> list[int]:
    if not isinstance(prompt, Sequence) or not all(type(token_id) is int for token_id in prompt):
        raise RequestError("a prompt must be a string or a list of token ids", param="prompt")
    return list(prompt)


def check_request(
    model: ModelInfo,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    pooling: PoolingParams | None = None,
) -> None:
    """Check that the model can run a request.

    Raises: RequestError if a token id is invalid, if prompt and output exceed the context, if the model generates no
    text, or if it drafts no tokens to report.
    """
    if pooling is None:
        check_generates(model)
    for name, token_ids in (
        ("prompt", prompt_token_ids),
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
    ):
        bad = next((token_id for token_id in token_ids if not 0 <= token_id < model.vocab_size), None)
        if bad is not None:
            raise RequestError(
                f"{name} has token id {bad}; this model's token ids go from 0 to {model.vocab_size - 1}", param=name
            )
    if params.token_trees and not model.speculators:
        raise RequestError(
            "token_trees requests drafted tokens, but this server has no speculator; start it with one, such as "
            "--speculator suffix",
            param="token_trees",
        )
    barred = {*params.stop_token_ids, *(model.eos_token_ids if params.ends_by_eos else ())}
    if params.min_tokens > 0 and len(barred) >= model.vocab_size:
        raise RequestError(
            "stop_token_ids names every token, and min_tokens bars them all: no token could be generated",
            param="stop_token_ids",
        )
    if not prompt_token_ids:
        raise RequestError("the prompt is empty", param="prompt")
    check_input(model, prompt_token_ids, params)
    num_prompt = len(prompt_of(model, prompt_token_ids).token_ids)
    if num_prompt + 1 > model.max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt} tokens; the context of {model.max_model_len} tokens must hold the prompt "
            "and at least one more. Shorten the prompt, or serve the model with a longer context if it has one",
            param="prompt",
        )
    if num_prompt + (params.max_tokens or 0) > model.max_model_len:
        raise RequestError(
            f"the prompt's {num_prompt} tokens and max_tokens {params.max_tokens} exceed the context of "
            f"{model.max_model_len} tokens; max_tokens may be at most {model.max_model_len - num_prompt}",
            param="max_tokens",
        )


def make_submissions(
    request_id: str,
    prompt_token_ids: list[int],
    params: SamplingParams,
    *,
    defaults: TokenChoice,
    is_batch: bool = False,
    pooling: PoolingParams | None = None,
) -> list[Submission]:
    """Return one submission for each of the n completions, named request_id-0 and so on.

    `defaults` are the model's, for fields that the request leaves open.
    The seeds are those of `child_seed`: the same for the same seed, random without one. Log-probabilities of
    the prompt are asked for once.
    """
    seed = int.from_bytes(os.urandom(8)) >> 1 if params.seed is None else params.seed
    params = params.with_defaults(defaults)
    later_params = replace(params, prompt_logprobs=None)
    return [
        Submission(
            f"{request_id}-{index}",
            prompt_token_ids,
            later_params if index else params,
            child_seed(seed, index),
            is_batch,
            pooling=pooling,
        )
        for index in range(params.n)
    ]
