"""Unions with a `type` or another key that selects the member: an error is about that member only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from pydantic import BeforeValidator, Discriminator

from moeflow.server.api.schema.strict_model import refusal

TAG: Final = "<"  # with which tags begin; in the place of an error they are no field
_NOTHING: Mapping[str, str] = {}


def by_type(default: str | None = None, *, key: str = "type", groups: Mapping[str, str] = _NOTHING) -> Discriminator:
    """Return what tells members apart that are tagged `<TYPE>`; without a type it is the `default`.

    `groups` has the tag's name for types that are one member.
    """

    def tag_of(value: Any) -> str | None:
        kind = value.get(key, default) if isinstance(value, dict) else getattr(value, key, default)
        return f"{TAG}{groups.get(kind, kind)}>" if isinstance(kind, str) else None

    message = f"must be an object with a {key} that is known here"
    return Discriminator(tag_of, custom_error_type="no_member", custom_error_message=message)


def text_or_list() -> Discriminator:
    """Return what tells a text, tagged `<text>`, from a list, tagged `<list>`."""

    def tag_of(value: Any) -> str:
        return f"{TAG}list>" if isinstance(value, list) else f"{TAG}text>"

    return Discriminator(tag_of)


def known_types(
    what: str, known: Collection[str], reasons: Mapping[str, str] = _NOTHING, *, also: Collection[str] = ()
) -> BeforeValidator:
    """Return what refuses members of other types by name, some for `reasons` of their own.

    Types in `also` are known, too, but errors do not list them.
    """
    expected = ", ".join(known)

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in known and kind not in also:
            reason = reasons.get(kind, f"send one of {expected}")
            raise refusal("type", f"{what} of type {kind[:80]!r} are not supported: {reason}")
        return value

    return BeforeValidator(check)
