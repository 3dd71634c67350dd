"""Requests that arrive at random, of random length: ExpertFlow's workload (thesis 6.2.3.1, after Orca).

Arrivals are a Poisson process of rate lambda: the k-th arrival is Erlang(k, lambda), a sum of k exponential
gaps. (The thesis' formula 6.3 scales the sum by 1/k. The Erlang distribution that it names needs 1/lambda.) Lengths of
prompts and answers are uniform. So is each prompt token over the vocabulary.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from moeflow.core.arrival_rate import check_rate
from moeflow.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """What traffic to make. The same spec makes the same requests. Raises: ConfigError if a number makes no sense."""

    rate: float  # lambda: requests a second, on average
    num_requests: int
    min_prompt: int = 8  # tokens
    max_prompt: int = 128
    min_new: int = 1
    max_new: int = 128
    vocab_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_rate(self.rate)
        if self.num_requests < 1:
            raise ConfigError(f"the number of requests is {self.num_requests}; it must be at least 1")
        for name, low, high in (
            ("prompt length", self.min_prompt, self.max_prompt),
            ("number of new tokens", self.min_new, self.max_new),
        ):
            if not 1 <= low <= high:
                raise ConfigError(f"the {name} is to be from {low} to {high}; it needs 1 <= from <= to")
        if self.vocab_size < 1:
            raise ConfigError(f"a vocabulary of {self.vocab_size} tokens has nothing to draw from")

    @property
    def max_total(self) -> int:
        """Tokens of the longest request that may come."""
        return self.max_prompt + self.max_new


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the traffic."""

    at_s: float  # since the start
    prompt_token_ids: list[int]
    num_new: int  # tokens to generate, no fewer and no more


def make_arrivals(spec: WorkloadSpec) -> list[Arrival]:
    """Return the requests in order of arrival.

    Lengths do not depend on the rate, so runs at different rates compare. Tokens do, so that no run finds the prompts
    of an earlier one in a prefix cache.
    """
    gaps = random.Random(f"gaps {spec.seed}")
    lengths = random.Random(f"lengths {spec.seed}")
    tokens = random.Random(f"tokens {spec.seed} {spec.rate}")
    arrivals = []
    at_s = 0.0
    for _ in range(spec.num_requests):
        at_s -= math.log(1.0 - gaps.random()) / spec.rate
        num_prompt = lengths.randint(spec.min_prompt, spec.max_prompt)
        num_new = lengths.randint(spec.min_new, spec.max_new)
        prompt = [tokens.randrange(spec.vocab_size) for _ in range(num_prompt)]
        arrivals.append(Arrival(at_s, prompt, num_new))
    return arrivals
