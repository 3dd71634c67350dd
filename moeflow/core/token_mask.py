"""Which tokens may follow, of a request whose answer must have a form; and who knows that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class TokenMask(msgspec.Struct, frozen=True):
    """The tokens that may come at one place."""

    allowed: bytes = b""  # a bit for each token, the lowest of each byte first; tokens beyond the last bit may not come
    error: str | None = None  # why the mask is unknown; the request then fails


class TokenConstraint(Protocol):
    """Follows the answer of one request."""

    @property
    def is_slow(self) -> bool:
        """Whether the next masks will probably take long."""

    def masks(self, token_ids: Sequence[int], paths: Sequence[Sequence[int]]) -> list[TokenMask | None]:
        """Return what may follow an answer's tokens so far and each of these paths behind them.

        None: the path itself may not follow, so it will not be asked for. Calls come with ever longer answers.
        """
