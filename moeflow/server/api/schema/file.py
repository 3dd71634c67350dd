"""What `/v1/files` takes and gives, in OpenAI's words."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from moeflow.server.api.schema.field_rules import Rule, together
from moeflow.server.api.schema.strict_model import Record, StrictModel

MIN_LIFETIME_S = 3600
MAX_LIFETIME_S = 30 * 24 * 3600


class UploadForm(StrictModel):
    """A file and its purpose, as the fields of a form: their values are text."""

    rules: ClassVar[tuple[Rule, ...]] = (together("expires_after[anchor]", "expires_after[seconds]"),)

    file: Annotated[Any, WithJsonSchema({"type": "string", "format": "binary"})]
    purpose: Literal["batch"]
    anchor: Literal["created_at"] = Field("created_at", alias="expires_after[anchor]")
    lifetime_s: int = Field(
        MAX_LIFETIME_S, ge=MIN_LIFETIME_S, le=MAX_LIFETIME_S, strict=False, alias="expires_after[seconds]"
    )


UPLOAD_BODY: dict[str, Any] = {  # for the document: the endpoint reads the form itself
    "required": True,
    "content": {"multipart/form-data": {"schema": UploadForm.model_json_schema()}},
}


Purpose = Literal["batch", "batch_output"]


class FileObject(Record):
    """A file's description, kept on disk as it is."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"


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
