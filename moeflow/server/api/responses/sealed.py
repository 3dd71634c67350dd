"""Fields that OpenAI encrypts, such as `encrypted_content`. This server writes text into them, and reads it again."""

from __future__ import annotations

import base64
from typing import Final

from moeflow.server.api.schema.left_out import leave_out

_OURS: Final = "moeflow:"
_ENCRYPTED: Final = "gAAAAA"  # the first characters of what OpenAI encrypts


def sealed(text: str) -> str:
    """Return the content for a text."""
    return _OURS + base64.b64encode(text.encode()).decode("ascii")


def unsealed(content: str, place: str) -> str:
    """Return the text of a content that this server wrote; "", with a note, of any other."""
    if content.startswith(_OURS):
        try:
            return base64.b64decode(content.removeprefix(_OURS), validate=True).decode()
        except ValueError:  # no Base64, or no UTF-8 in it
            pass
    leave_out(f"{place} (encrypted)")
    return ""


def plain_or_unsealed(content: str, place: str) -> str:
    """Return a text that clients pass between calls as if it was encrypted; "", with a note, if it is."""
    return unsealed(content, place) if content.startswith((_OURS, _ENCRYPTED)) else content
