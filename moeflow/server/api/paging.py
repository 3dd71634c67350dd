"""Lists that are read a page at a time, as OpenAI's clients do it: `after` names the last one they have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from moeflow.server.errors import ApiError


class _HasId(Protocol):
    id: str


def page(items: Sequence[_HasId], after: str | None, limit: int) -> dict[str, Any]:
    """Return one page of a list.

    Raises: ApiError 400 if there is no such item to go on after.
    """
    start = 0
    if after is not None:
        ids = [item.id for item in items]
        if after not in ids:
            raise ApiError(400, "invalid_value", f"after: there is no {after[:80]!r} in the list", param="after")
        start = ids.index(after) + 1
    shown = items[start : start + limit]
    return {
        "object": "list",
        "data": msgspec.to_builtins(shown),
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": start + limit < len(items),
    }
