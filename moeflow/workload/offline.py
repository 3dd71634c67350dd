"""Requests of batch jobs: prompts of the lengths that MoE-Lightning measures with, all there at once.

MTBench's are those of its questions, which the user supplies; the two HELM tasks are made up with their average and
longest length. Every answer has the same length, and prompt tokens are uniform over the vocabulary: measurements depend
on lengths, not on words. (MoE-Lightning, table 3 and section 6.1)
"""

from __future__ import annotations

import random
from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moeflow.core.errors import ConfigError
from moeflow.core.untrusted import parse_json
from moeflow.workload.poisson import Arrival


@dataclass(frozen=True, slots=True)
class OfflineShape:
    """Lengths of a kind of job, in tokens."""

    name: str
    mean_prompt: int
    longest_prompt: int
    num_new: int


REASONING = OfflineShape("reasoning", 242, 256, 50)  # HELM synthetic reasoning
SUMMARIZATION = OfflineShape("summarization", 1693, 1984, 64)  # HELM summarization
SHAPES = {shape.name: shape for shape in (REASONING, SUMMARIZATION)}
MTBENCH_NEW = 128  # tokens of an answer; the paper has 32, 64, 128 and 256


def made_up_lengths(shape: OfflineShape, num_requests: int, seed: int) -> list[int]:
    """Return prompt lengths, uniform from as far below the average as the longest is above it."""
    lengths = random.Random(f"lengths {shape.name} {seed}")
    shortest = max(2 * shape.mean_prompt - shape.longest_prompt, 1)
    return [lengths.randint(shortest, shape.longest_prompt) for _ in range(num_requests)]


def replicated_lengths(lengths: Sequence[int], num_requests: int, seed: int) -> list[int]:
    """Return as many lengths, each as often as the others as far as that goes, in random order."""
    order = random.Random(f"order {seed}")
    drawn: list[int] = []
    while len(drawn) < num_requests:
        drawn += order.sample(list(lengths), len(lengths))
    return drawn[:num_requests]


def read_questions(path: Path) -> list[str]:
    """Return the first turn of each question of a file in MTBench's format.

    Raises: ConfigError, naming the line, if it is none; OSError.
    """
    questions = []
    for number, line in enumerate(path.read_bytes().removeprefix(BOM_UTF8).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            question = parse_json(line)["turns"][0]
            if not (isinstance(question, str) and question):
                raise ValueError
            questions.append(question)
        except (ValueError, KeyError, IndexError, TypeError):
            raise ConfigError(
                f'{path}, line {number}: no question; a line is {{"turns": ["first question", ...]}}'
            ) from None
    if not questions:
        raise ConfigError(f"{path} holds no question")
    return questions


def make_job(prompt_lengths: Sequence[int], num_new: int, vocab_size: int, seed: int) -> list[Arrival]:
    """Return the requests of a job, due at once."""
    tokens = random.Random(f"tokens {seed}")
    return [Arrival(0.0, [tokens.randrange(vocab_size) for _ in range(length)], num_new) for length in prompt_lengths]
