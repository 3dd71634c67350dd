"""Answers held against the types of the openai client."""

from __future__ import annotations

from pydantic import BaseModel


def check(value: BaseModel) -> None:
    """Exactly the client's own type: nothing missing, nothing of another type, nothing it does not know."""
    type(value).model_validate_json(value.model_dump_json(), strict=True)
    check_no_extras(value)


def check_no_extras(value: object) -> None:
    if isinstance(value, BaseModel):
        assert not value.model_extra, f"{type(value).__name__} does not know {value.model_extra}"
        for name in type(value).model_fields:
            check_no_extras(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            check_no_extras(item)
