"""Rearranges a conversation as far as a chat template needs it, so that the model reads each message.

Some templates take a system message at the beginning only, or none. Others need users and assistants to alternate.
They raise an error, or drop a message in silence. A rendering of short markers in place of the texts shows both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, Final

from moeflow.core.errors import RequestError

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages], str]
_SPOKEN: Final = ("system", "user")  # roles that get a marker
_MARKER: Final = "markertext{}x"
_SIMPLE: Final = ({"role": "system", "content": "x"}, {"role": "user", "content": "x"})


class MessageOrder:
    """The shapes of conversations that one chat template takes."""

    def __init__(self) -> None:
        self._takes_system: bool | None = None  # without variables; None: not yet asked

    def arranged(self, messages: Messages, render: Render, *, has_variables: bool) -> Messages:
        """Return the messages as they are, or the nearest arrangement that the template takes.

        `render` is the template with the request's variables. Raises: ChatTemplateError if the template is broken.
        """
        is_plain = not _is_unusual(messages)
        if is_plain and (messages[0]["role"] != "system" or self._takes_a_system_message(render, has_variables)):
            return messages
        return next((order for order in _arrangements(messages) if _takes(order, render)), messages)

    def _takes_a_system_message(self, render: Render, has_variables: bool) -> bool:
        if has_variables:  # the template may decide by them
            return _takes(_SIMPLE, render)
        if self._takes_system is None:
            self._takes_system = _takes(_SIMPLE, render)
        return self._takes_system


def system_first(messages: Messages) -> Messages:
    """Return a conversation with one system message at its beginning: all such texts in their order."""
    texts = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others] if texts else messages


def system_in_user(messages: Messages) -> Messages:
    """Return a conversation without system messages: the first message of the user begins with their texts."""
    if all(message["role"] != "system" for message in messages):
        return messages
    system, *others = system_first(messages)
    place = next((place for place, message in enumerate(others) if message["role"] == "user"), None)
    if place is None:
        return [{"role": "user", "content": system["content"]}, *others]
    others[place] = _joined(system, others[place]) | {"role": "user"}
    return others


def later_as_users(messages: Messages) -> Messages:
    """Return a conversation whose system messages after the first answer are a user's, at their places.

    At the front they would change the beginning of the prompt, and the prefix cache would be of no use.
    """
    first = next((place for place, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return [
        {**message, "role": "user"} if message["role"] == "system" and place > first else message
        for place, message in enumerate(messages)
    ]


def turns_joined(messages: Messages) -> Messages:
    """Return a conversation whose users and assistants alternate: messages in a row are one."""
    found: list[Mapping[str, Any]] = []
    for role, in_a_row in groupby(messages, key=itemgetter("role")):
        turns = list(in_a_row)
        found += [_joined(*turns)] if role in ("user", "assistant") and len(turns) > 1 else turns
    return found


def users_in_results(messages: Messages) -> Messages:
    """Return a conversation whose results of calls include the text of the user behind them."""
    found: list[Mapping[str, Any]] = []
    for message in messages:
        if found and message["role"] == "user" and found[-1]["role"] == "tool":
            found[-1] = _joined(found[-1], message)
        else:
            found.append(message)
    return found


def _arrangements(messages: Messages) -> Iterator[Messages]:
    """Yield different arrangements; the first change the least."""
    tried: list[Messages] = []
    later = later_as_users(messages)
    for placed in (messages, system_first(later), system_in_user(later)):
        joined = turns_joined(placed)
        for order in (placed, joined, users_in_results(joined)):
            if order not in tried:
                tried.append(order)
                yield order


def _is_unusual(messages: Messages) -> bool:
    """Return whether some template may not take the roles in this order."""
    roles = [message["role"] for message in messages]
    begin = next((role for role in roles if role != "system"), "user")
    repeated = any(a == b != "tool" or (a, b) == ("tool", "user") for a, b in pairwise(roles))
    return "system" in roles[1:] or begin != "user" or repeated


def _takes(messages: Messages, render: Render) -> bool:
    """Return whether a template takes messages of these roles, and shows each that somebody says to the model."""
    markers = {place: _MARKER.format(place) for place, it in enumerate(messages) if it["role"] in _SPOKEN}
    marked = [{**it, "content": markers.get(place, "x")} for place, it in enumerate(messages)]
    try:
        text = render(marked)
    except RequestError:
        return False
    return all(marker in text for marker in markers.values())


def _joined(*messages: Mapping[str, Any]) -> dict[str, Any]:
    """Return one message of several, with the fields of all; texts, reasoning and calls follow each other."""
    joined: dict[str, Any] = {}
    for message in messages:
        joined |= message
    joined["role"] = messages[0]["role"]
    for name in ("content", "reasoning_content"):
        texts = [message[name] for message in messages if message.get(name)]
        if texts or name == "content":
            joined[name] = "\n\n".join(texts)
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return joined | ({"tool_calls": calls} if calls else {})
