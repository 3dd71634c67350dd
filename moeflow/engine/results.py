"""What the offline API returns: one object a prompt, with its n completions. The names are vLLM's."""

from __future__ import annotations

import msgspec

from moeflow.core.request import FinishReason
from moeflow.text.drafted_passes import DraftedPass
from moeflow.text.output_text import TextDelta, TokenText


class CompletionOutput(msgspec.Struct):
    """One completion of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = []  # a stop token, and all of a stop string's tokens, included
    logprobs: list[TokenText] | None = None  # one a token, if asked for
    drafted_passes: list[DraftedPass] | None = None  # one a pass that brought tokens, if token trees are asked for
    finish_reason: FinishReason | None = None  # compares equal to "stop", "length", ...
    stop_reason: int | str | None = None  # the stop token or stop string that ended it; None for the model's EOS
    error: str | None = None  # with finish_reason "error": this one failed, the others did not

    def add(self, delta: TextDelta) -> None:
        """Take what a pass brought."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs
        if delta.drafted_pass is not None:
            self.drafted_passes = self.drafted_passes or []
            self.drafted_passes.append(delta.drafted_pass)
        self.finish_reason, self.stop_reason, self.error = delta.finish_reason, delta.stop_reason, delta.error


class RequestOutput(msgspec.Struct):
    """A prompt and what came of it."""

    prompt: str | None  # as it was given; None if it came as token ids or as a conversation
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenText | None] | None = None  # if asked for; the first token has none
    num_cached_tokens: int = 0  # prompt tokens that the prefix tree saved

    def add(self, delta: TextDelta) -> None:
        """Take what a pass brought for one of the completions."""
        self.outputs[delta.index].add(delta)
        if delta.index == 0:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = list(delta.prompt_logprobs)
