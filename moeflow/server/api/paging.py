"""Lists that are read a page at a time, as OpenAI's clients do it: `after` names the last one they have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Protocol

from fastapi import Query

from moeflow.server.errors import ApiError


class _HasId(Protocol):
    id: str


After = Annotated[str | None, Query(min_length=1, description="The id of the last one on the page before.")]


def page(items: Sequence[_HasId], after: str | None, limit: int, *, kind: str) -> dict[str, Any]:
    """Return one page of a list. Raises: ApiError 404 `KIND_not_found` if there is no such item to go on after."""
    start = 0
    if after is not None:
        ids = [item.id for item in items]
        if after not in ids:
            message = f"after: there is no {after[:80]!r} in the list"
            raise ApiError(404, f"{kind}_not_found", message, param="after")
        start = ids.index(after) + 1
    shown = items[start : start + limit]
    return {
        "object": "list",
        "data": list(shown),
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": start + limit < len(items),
    }
