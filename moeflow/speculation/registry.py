"""The speculators there are, by the names that users give them: a new one is a file and a row here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from moeflow.speculation.speculator import Speculator
from moeflow.speculation.suffix import SuffixSpeculator

SPECULATORS: Final[dict[str, Callable[[], Speculator]]] = {SuffixSpeculator.name: SuffixSpeculator}
