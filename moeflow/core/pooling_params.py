"""What a request is to return in place of tokens: one vector, made of the hidden states of its prompt.

Names are those of sentence-transformers' pooling layers and of the OpenAI API (`dimensions`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from moeflow.core.errors import RequestError
from moeflow.core.truncated_repr import truncated_repr

PoolingKind = Literal["last", "mean", "first"]
POOLING_KINDS: Final[tuple[PoolingKind, ...]] = get_args(PoolingKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How hidden states [P, H] after the final norm become one vector.

    Raises: RequestError, naming the parameter, when a value is out of its range.
    """

    kind: PoolingKind = "last"  # that of the last token, the mean of all, or that of the first
    normalize: bool = True  # to length 1, after `dimensions`
    dimensions: int | None = None  # how many of the vector's first numbers are kept; None: all
    classifies: bool = False  # the vector is classified: the result has the probabilities of classes

    def __post_init__(self) -> None:
        if self.kind not in POOLING_KINDS:
            kinds = ", ".join(POOLING_KINDS)
            raise RequestError(f"pooling must be one of {kinds}, not {truncated_repr(self.kind)}", param="pooling")
        dimensions = self.dimensions
        if dimensions is None:
            return
        if isinstance(dimensions, bool) or not isinstance(dimensions, int) or dimensions < 1:
            raise RequestError(
                f"dimensions must be a whole number from 1 on, not {truncated_repr(dimensions)}", param="dimensions"
            )

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether it takes hidden states of tokens before the last, which a cached prefix does not have."""
        return self.kind != "last"
