"""From an engine's token outputs to text, while it is generated.

Text is returned as soon as it is certain. Bytes of an incomplete character are held back, and text that may become a
stop string. Both cost the same for each token, however
long the text. Knows nothing of where outputs come from.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec

from moeflow.core.engine_messages import PromptProgress, TokenLogprobs, TokenOutput
from moeflow.core.request import FinishReason
from moeflow.core.sampling_params import SamplingParams
from moeflow.text.drafted_passes import DraftedPass, DraftTexts
from moeflow.text.stop_strings import StopWatch
from moeflow.text.tokenizer import Tokenizer


class TopToken(msgspec.Struct, frozen=True):
    """One of the likeliest tokens at a position."""

    token_id: int
    text: str
    utf8: bytes
    logprob: float


class TokenText(msgspec.Struct, frozen=True):
    """A token with its log-probability, as text. Part of a character reads as U+FFFD; `utf8` has its bytes."""

    token_id: int
    text: str
    utf8: bytes
    logprob: float
    rank: int  # 1: the likeliest
    top: tuple[TopToken, ...]  # likeliest first


class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one pass brought for one of the n completions of a prompt.

    Tokens are reported as they come, their text as soon as it is certain: in this delta or a later one.
    """

    index: int  # which completion
    text: str = ""
    token_ids: tuple[int, ...] = ()  # a stop token, and all of a stop string's tokens, included
    logprobs: tuple[TokenText, ...] | None = None  # one a token, if asked for
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or stop string that ended it; None for the model's EOS
    num_cached_tokens: int = 0  # prompt tokens that the prefix tree saved
    num_drafted_tokens: int = 0  # drafts that the pass computed; the new tokens except the last were among them
    drafted_pass: DraftedPass | None = None  # with new tokens, if token trees are asked for
    queued_s: float | None = None  # waited before its first pass; with the first output
    embedding: bytes | None = None  # of a prompt that is pooled: see `core.embedding_bytes`; with the only delta
    prompt_progress: PromptProgress | None = None  # if asked for, in deltas of their own before the first token
    error: str | None = None  # with FinishReason.ERROR
    blames_request: bool = False  # with an error: the request asks for something that cannot be
    prompt_logprobs: tuple[TokenText | None, ...] | None = None  # once, in the first delta of index 0; [0] is None


class SequenceText:
    """The text of one sequence, fed with the engine's outputs as they arrive."""

    def __init__(
        self, index: int, tokenizer: Tokenizer, params: SamplingParams, shown: frozenset[int] = frozenset()
    ) -> None:
        """Special tokens are omitted according to `params`, except `shown` ones."""
        self._index = index
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens, shown=shown)
        self._watch = StopWatch(params.stop, include_match=params.include_stop_str_in_output)
        self._shows_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._drafts = DraftTexts(tokenizer) if params.token_trees else None

    def push(self, output: TokenOutput) -> TextDelta:
        """Take what a pass brought and return it with the text that became certain; at the end, all of it.

        A stop string ends the sequence at its last token, independent of the engine. Later tokens are dropped, and the
        caller must cancel the rest. The token that ended a sequence with FinishReason.STOP
        has no text, unless stop strings are to be included.
        """
        text, num_tokens = self._read(output.token_ids, output.finish_reason)
        stop, logprobs, prompt = self._watch.match, output.logprobs, output.prompt_logprobs
        return TextDelta(
            index=self._index,
            text=text,
            token_ids=tuple(output.token_ids[:num_tokens]),
            logprobs=None if logprobs is None else tuple(map(self._describe, logprobs[:num_tokens])),
            finish_reason=output.finish_reason if stop is None else FinishReason.STOP,
            stop_reason=output.stop_token_id if stop is None else stop,
            num_cached_tokens=output.num_cached_tokens,
            num_drafted_tokens=output.num_drafted_tokens,
            drafted_pass=None if self._drafts is None else self._drafts.push(output, num_tokens),
            queued_s=output.queued_s,
            embedding=output.embedding,
            prompt_progress=output.prompt_progress,
            error=output.error if stop is None else None,
            blames_request=output.blames_request,
            prompt_logprobs=None
            if prompt is None
            else tuple(None if token is None else self._describe(token) for token in prompt),
        )

    def _read(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> tuple[str, int]:
        """Return the text that became certain, and how many of the tokens belong to the sequence."""
        pieces = []
        has_silent_end = finish_reason is FinishReason.STOP and not self._shows_stop
        for count, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            if has_silent_end and count == len(token_ids):
                break
            text = self._detokenizer.push(token_id)
            pieces.append(self._watch.push(text, may_match=self._num_tokens >= self._min_tokens))
            if self._watch.match is not None:
                return "".join(pieces), count
        if finish_reason is not None:
            pieces += [self._watch.push(self._detokenizer.flush()), self._watch.flush()]
        return "".join(pieces), len(token_ids)

    def _describe(self, token: TokenLogprobs) -> TokenText:
        """Put a token's log-probabilities into text."""
        utf8 = self._tokenizer.token_bytes(token.token_id)
        top = []
        for token_id, logprob in token.top:
            top_utf8 = self._tokenizer.token_bytes(token_id)
            top.append(TopToken(token_id, _readable(top_utf8), top_utf8, logprob))
        return TokenText(token.token_id, _readable(utf8), utf8, token.logprob, token.rank, tuple(top))


class Detokenizer:
    """Turns the tokens of one sequence into text, whole characters at a time.

    The text continues a text before it: the first SentencePiece token keeps its leading space, since it follows the
    prompt.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, shown: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids - shown if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Take one token and return the characters it completes."""
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """Return U+FFFD if the text ends in the middle of a character."""
        return self._decoder.decode(b"", final=True)


def _readable(utf8: bytes) -> str:
    return utf8.decode("utf-8", errors="replace")
