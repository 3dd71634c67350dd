"""Token counts of a request, in OpenAI's form."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from moeflow.server.generation import Generation


class PromptTokensDetails(BaseModel):
    """Where the prompt's tokens came from."""

    cached_tokens: int  # found in the prefix tree, not computed again


class CompletionTokensDetails(BaseModel):
    """Numbers of drafted and accepted tokens (--speculator)."""

    accepted_prediction_tokens: int  # of the completion's tokens: these took no pass of their own
    rejected_prediction_tokens: int  # computed in vain; not in the completion


class TokenUsage(BaseModel):
    """Tokens in and out. A prompt counts once, however many completions it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage(generation: Generation) -> dict[str, Any]:
    """Return the counts so far."""
    prompt, completion = generation.num_prompt_tokens, generation.num_completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": generation.num_accepted_tokens,
            "rejected_prediction_tokens": generation.num_drafted_tokens - generation.num_accepted_tokens,
        },
    }
