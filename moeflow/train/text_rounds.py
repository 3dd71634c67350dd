"""Text to learn from, collected in rounds that a work folder keeps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor

from moeflow.core.errors import ConfigError
from moeflow.train.phases import OnProgress, Phase
from moeflow.train.work_folder import StateFile, WorkFolder


@dataclass(frozen=True, slots=True)
class TextColumns:
    """Sequences one after another. Shapes: token_ids [N] int64; lengths [S] int64."""

    token_ids: Tensor
    lengths: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens that count as text to learn from."""
        return len(self.token_ids)

    def tensors(self) -> dict[str, Tensor]:
        """Return all columns by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def sequences(self) -> list[slice]:
        """Return the rows of each sequence."""
        ends = self.lengths.cumsum(0).tolist()
        return [slice(end - length, end) for end, length in zip(ends, self.lengths.tolist(), strict=True)]

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return all parts as one text. Raises: ConfigError without a part."""
        if not parts:
            raise ConfigError("there is no text to learn from: add text (--data)")
        columns = zip(*(part.tensors().values() for part in parts), strict=True)
        return cls(*(torch.cat(column) for column in columns))


Text = TypeVar("Text", bound=TextColumns)


class TextRounds(Generic[Text]):
    """The rounds so far. A round depends on its number alone, so that resumed work has the same text."""

    def __init__(
        self,
        kind: type[Text],
        work: WorkFolder,
        report: OnProgress,
        *,
        text_tokens: int | None,
        seconds: float,
    ) -> None:
        """`text_tokens` are enough, or None: `seconds` from the start of `collect`. Raises: CheckpointError."""
        self._work, self._report = work, report
        self._text_tokens, self._seconds, self._began_s = text_tokens, seconds, math.inf
        self._in_round = 0  # tokens of the round that is not complete
        self.rounds: list[Text] = []
        while (kept := self._file.load()) is not None:
            self.rounds.append(kind(**kept[0]))

    @property
    def num_tokens(self) -> int:
        """Tokens of all rounds."""
        return sum(text.num_tokens for text in self.rounds)

    @property
    def is_enough(self) -> bool:
        """Whether no round is missing."""
        done, total = self._count()
        return bool(self.rounds) and done >= total

    def collect(self, next_round: Callable[[int], Text | None]) -> None:
        """Add rounds until there are enough, or next_round(number) returns None. Raises: ConfigError, OSError."""
        self._began_s = time.monotonic()
        while not self.is_enough and (text := next_round(len(self.rounds))) is not None:
            self._file.save(text.tensors())
            self.rounds.append(text)
            self._in_round = 0
        self._report(Phase.TEXT, self.num_tokens, self.num_tokens)

    def on_tokens(self, num_tokens: int) -> None:
        """Report progress within a round."""
        self._in_round += num_tokens
        done, total = self._count(self._in_round)
        if done < total:
            self._report(Phase.TEXT, int(done), int(total) + 1)

    def _count(self, in_round: int = 0) -> tuple[float, float]:
        if self._text_tokens is not None:
            return self.num_tokens + in_round, self._text_tokens
        return time.monotonic() - self._began_s, self._seconds

    @property
    def _file(self) -> StateFile:
        return self._work.file(f"text-{len(self.rounds):05d}")
