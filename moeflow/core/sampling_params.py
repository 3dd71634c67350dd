"""How the tokens of one request are chosen and when it ends.

Names and defaults are those of the OpenAI API and of vLLM's extensions, so that users already know
them. Text-level options (`stop`) are stored here, too. The engine uses token ids only; the detokenizer looks for stop
strings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Final

from moeflow.core.errors import RequestError
from moeflow.core.token_choice import TokenChoice

MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024  # of one stop string: bounds what looking for it costs each token
MAX_SEED = 2**63 - 1
MAX_GRAMMAR_CHARACTERS = 2**21
MAX_TEMPERATURE = 2.0  # OpenAI's limit
MIN_REPETITION_PENALTY = 0.01  # logits are divided by it: nearer to 0 they would overflow
MAX_REPETITION_PENALTY = 100.0
CHOICE_FIELDS: Final = tuple(field.name for field in fields(TokenChoice))
_RANGES: Final = (
    ("temperature", 0.0, MAX_TEMPERATURE),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
)
_SHOWN_CHARACTERS = 40  # of a refused value


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request.

    The fields of `TokenChoice` are None where the request leaves them to the model's defaults.

    Raises: RequestError, naming the parameter, when a value is out of its range.
    """

    n: int = 1  # completions for one prompt
    max_tokens: int | None = 16  # None: until the context is full
    min_tokens: int = 0  # end-of-sequence and stop tokens are barred before this many
    temperature: float | None = None  # 0: greedy, 2 at most
    top_k: int | None = None  # 0 (or -1): all tokens
    top_p: float | None = None
    min_p: float | None = None  # relative to the likeliest token
    repetition_penalty: float | None = None  # over prompt and output; 1: off, from 0.01 to 100
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output, per occurrence
    seed: int | None = None  # None: different on every run
    logprobs: int | None = None  # number of likeliest tokens to report in addition to the chosen one
    prompt_logprobs: int | None = None  # the same for every prompt token but the first
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: str | Sequence[str] = ()  # kept as a tuple
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    grammar: str = ""  # the form of the answer, as llguidance takes it: Lark, or JSON with several grammars; "": any
    token_trees: bool = False  # report the drafted tokens of each pass, and the accepted ones
    prompt_progress: bool = False  # report after each pass how far the prompt is computed

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 0, 2**31)
        _check_int("min_tokens", self.min_tokens, 0, 2**31)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})", param="min_tokens"
            )
        if self.top_k is not None:
            _check_int("top_k", self.top_k, -1, 2**31)
        for name, low, high in _RANGES:
            if (value := getattr(self, name)) is not None:
                _check_float(name, value, low, high)
        if self.top_p == 0.0:
            raise RequestError("top_p must be above 0; for greedy decoding set temperature to 0", param="top_p")
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _check_int(name, count, 0, MAX_LOGPROBS)
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias", token_id, 0, 2**31)
            _check_float("logit_bias", bias, -100.0, 100.0)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        if len(self.grammar) > MAX_GRAMMAR_CHARACTERS:
            raise RequestError(
                f"the form of the answer takes {len(self.grammar)} characters; at most {MAX_GRAMMAR_CHARACTERS}",
                param="grammar",
            )
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))

    def choice(self, defaults: TokenChoice) -> TokenChoice:
        """Return how tokens are chosen: as set here, and by `defaults` where a field is None."""
        given = {name: getattr(self, name) for name in CHOICE_FIELDS}
        return replace(defaults, **{name: value for name, value in given.items() if value is not None})

    def with_defaults(self, defaults: TokenChoice) -> SamplingParams:
        """Return parameters that leave nothing open."""
        return replace(self, **asdict(self.choice(defaults)))

    @property
    def ends_by_eos(self) -> bool:
        """Whether the model's end-of-sequence token ends it. An answer with a form has no other end."""
        return not self.ignore_eos or bool(self.grammar)


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} must be a whole number from {low} to {high}, not {_shown(value)}", param=name)


def _check_float(name: str, value: float, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # NaN is in no range
        raise RequestError(f"{name} must be a number from {low:g} to {high:g}, not {_shown(value)}", param=name)


def _shown(value: object) -> str:
    """Return a value as an error message shows it, however long it is."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _stop_strings(stop: object) -> tuple[str, ...]:
    """Return one stop string or several as a tuple. Raises: RequestError for other types and values out of bounds."""
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or not all(isinstance(text, str) for text in stops):
        raise RequestError(f"stop must be a string or a sequence of strings, not {_shown(stop)}", param="stop")
    if len(stops) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(stops)} strings; at most {MAX_STOP_STRINGS}", param="stop")
    if any(not text for text in stops):
        raise RequestError("stop holds an empty string, which would end every answer at once", param="stop")
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise RequestError(f"stop has a string of {longest} characters; at most {MAX_STOP_CHARACTERS}", param="stop")
    return tuple(stops)


def _stop_token_ids(token_ids: object) -> tuple[int, ...]:
    """Return token ids as a tuple. Raises: RequestError for other types."""
    if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Sequence):
        raise RequestError(
            f"stop_token_ids must be a sequence of token ids, not {_shown(token_ids)}", param="stop_token_ids"
        )
    for token_id in token_ids:
        _check_int("stop_token_ids", token_id, 0, 2**31)
    return tuple(token_ids)
