"""Images and files in requests, which a model of text cannot see: a text in their place, or a refusal (`--images`)."""

from __future__ import annotations

from typing import Any, ClassVar

from moeflow.server.api.schema import left_out
from moeflow.server.api.schema.strict_model import StrictModel, refusal


class UnreadPart(StrictModel):
    """A part of a message that the model cannot see."""

    kind: ClassVar[str] = "image"
    type: str

    @property
    def is_unread(self) -> bool:
        """Whether some of it is no text."""
        return True

    @property
    def text(self) -> str:
        """The text that the model reads in its place."""
        return f"[{self.kind} left out: this model reads text only]"


def check_parts(field: str, content: Any, *, is_result: bool) -> None:
    """Note the parts of a message's `field` that are left out. Raises: PydanticCustomError for one that is refused.

    `is_result`: it is the result of a tool.
    """
    policy = left_out.images()
    is_refused = policy == "refuse" or (policy == "results" and not is_result)
    for place, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, UnreadPart) or not part.is_unread:
            continue
        if is_refused:
            remedy = "send text, or start the server with --images placeholder"
            reason = f"parts of type {part.type!r} are not supported: the model reads text only; {remedy}"
            raise refusal(f"{field}[{place}].type", reason)
        left_out.leave_out(f"messages ({part.kind})")
