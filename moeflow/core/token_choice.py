"""How a token is chosen from its likelihoods, with nothing left open.

The fields of `SamplingParams` that a model's files may give defaults for. The defaults here are the engine's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoice:
    """Values of the sampler. `SamplingParams` checks them."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def changes(self) -> dict[str, float]:
        """Return the fields that differ from the engine's defaults."""
        engine = asdict(TokenChoice())
        return {name: value for name, value in asdict(self).items() if value != engine[name]}
