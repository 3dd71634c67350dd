"""Objects of the official clients, as tests get them from these."""

from __future__ import annotations

from pydantic import BaseModel

from tests.server.official_types import check_no_extras


def check(value: BaseModel) -> None:
    """Exactly the client's own type: nothing missing, nothing of another type, nothing it does not know."""
    type(value).model_validate_json(value.model_dump_json(), strict=True)
    check_no_extras(value, known=frozenset())
