"""What drafts the next tokens of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from moeflow.core.request import Request

Experts = frozenset[int]  # of all layers: an expert's number in its layer, plus those of the layers before it


class Draft(msgspec.Struct, frozen=True):
    """A draft of what follows a request's tokens.

    How sure its speculator is of each token is a *grade*: a small number that means nothing by itself. What tokens of a
    grade are worth is counted (`acceptance.py`), so a speculator need not know how good it is.
    """

    token_ids: tuple[int, ...]
    grades: tuple[int, ...]  # of each token
    # What the model will need for the request's last token, then for those of the draft, as far as that is known. It
    # orders reads and prices tokens: like a drafted token it may be wrong.
    experts: tuple[Experts, ...] = ()


class Speculator(Protocol):
    """Drafts. It may be wrong as often as it likes: no draft changes an answer."""

    name: str  # as users and statistics call it

    def propose(self, requests: Sequence[Request], max_depth: int) -> list[list[Draft]]:
        """Return for each request some drafts of up to `max_depth` tokens, the likeliest first; perhaps none."""

    def believed(self, grade: int) -> float:
        """Return what share of its tokens of a grade will be right, as far as it can tell before any was judged."""

    def forget(self, request: Request) -> None:
        """Drop the state of a finished request; it may be an unknown one."""
