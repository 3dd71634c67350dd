"""What `/v1/files` gives, in OpenAI's words."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

LEAST_LIFETIME_S = 3600
MOST_LIFETIME_S = 30 * 24 * 3600
UPLOAD_FORM: dict[str, Any] = {  # for the document: the endpoint reads the form itself
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "contentMediaType": "application/octet-stream"},
                    "purpose": {"type": "string", "enum": ["batch"]},
                    "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                    "expires_after[seconds]": {
                        "type": "integer",
                        "minimum": LEAST_LIFETIME_S,
                        "maximum": MOST_LIFETIME_S,
                    },
                },
            }
        }
    },
}


class FileObject(BaseModel):
    """A file's description."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class FileList(BaseModel):
    """A page of them."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    """It is gone."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True
