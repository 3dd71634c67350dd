"""What callers of `LLM` give: prompts, conversations and sampling parameters, as lists of what each request needs.

Only their form is checked here: whether the model can run a prompt is for `admission.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moeflow.core.errors import RequestError
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.truncated_repr import truncated_repr

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None


def prompts_in(prompts: object) -> list[Prompt]:
    """Return one prompt or several as a list. Raises: RequestError for any other value."""
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts)
    if items is None:
        raise RequestError(
            f"prompts must be a string, or a list of strings and of lists of token ids, not {truncated_repr(prompts)}",
            param="prompts",
        )
    if items and all(type(item) is int for item in items):
        raise RequestError("prompts is one list of token ids; a list of prompts is expected: [[...]]", param="prompts")
    return items


def conversations_in(messages: object) -> list[Sequence[Message]]:
    """Return one conversation or several as a list. Raises: RequestError for any other value."""
    items = _items(messages)
    if items is None or all(isinstance(item, Mapping) for item in items):
        return [conversation_in(messages if items is None else items)]
    return [conversation_in(item) for item in items]


def conversation_in(messages: object) -> Sequence[Message]:
    """Return one conversation. Raises: RequestError for any other value."""
    items = _items(messages)
    if items is None or not all(isinstance(item, Mapping) for item in items):
        raise RequestError(
            'a conversation must be a list such as [{"role": "user", "content": "Hello"}], not '
            f"{truncated_repr(messages)}; to complete a text, use generate",
            param="messages",
        )
    return items


def params_for_each(sampling_params: Params, count: int) -> list[SamplingParams]:
    """Return as many parameters as there are prompts. Raises: RequestError for another number, or other objects."""
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * count
    items = _items(sampling_params)
    if items is None or not all(isinstance(item, SamplingParams) for item in items):
        raise RequestError(
            f"sampling_params must be SamplingParams(...), or a list with one for each prompt, not "
            f"{truncated_repr(sampling_params)}",
            param="sampling_params",
        )
    if len(items) != count:
        raise RequestError(
            f"there are {len(items)} sampling_params for {count} prompts; give one for each, or one for all",
            param="sampling_params",
        )
    return items


def _items(given: object) -> list[Any] | None:
    """Return what a list, a tuple or an iterator holds; None for a text, a mapping, and what holds nothing."""
    if isinstance(given, str | bytes | bytearray | Mapping) or not isinstance(given, Iterable):
        return None
    return list(given)
