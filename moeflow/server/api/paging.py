"""Lists that are read a page at a time, as OpenAI's clients do it: `after` names the last one they have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Annotated, Any, TypeVar

from fastapi import Query

from moeflow.server.errors import ApiError

Listed = TypeVar("Listed")
After = Annotated[str | None, Query(min_length=1, description="The id of the last one on the page before.")]


def page(
    items: Sequence[Listed],
    after: str | None,
    limit: int,
    *,
    kind: str,
    id_of: Callable[[Listed], str] = attrgetter("id"),
) -> dict[str, Any]:
    """Return one page of a list. Raises: ApiError 404 `KIND_not_found` if there is no such item to go on after."""
    start = 0
    if after is not None:
        ids = [id_of(item) for item in items]
        if after not in ids:
            message = f"after: there is no {after[:80]!r} in the list"
            raise ApiError(404, f"{kind}_not_found", message, param="after")
        start = ids.index(after) + 1
    shown = items[start : start + limit]
    return {
        "object": "list",
        "data": list(shown),
        "first_id": id_of(shown[0]) if shown else None,
        "last_id": id_of(shown[-1]) if shown else None,
        "has_more": start + limit < len(items),
    }
