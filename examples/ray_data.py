"""Answers prompts of a Ray Data set: rows go to engines on the cluster's nodes, and come back with answers.

    python examples/ray_data.py MODEL PROMPTS.jsonl ANSWERS_FOLDER ENGINES THREADS

Each row of the input has a "prompt". Other columns stay. Needs `pip install 'moeflow[ray]' 'ray[data]'`, and the model
at the same path on every node.
"""

import sys
from typing import Any

import ray

from moeflow import LLM, SamplingParams

SAMPLING = SamplingParams(max_tokens=64, temperature=0.0)


class Answers:
    """An engine in an actor of Ray."""

    def __init__(self, model: str, num_threads: int) -> None:
        self.llm = LLM(model, threads=num_threads)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Answer a batch of rows."""
        results = self.llm.generate(list(rows["prompt"]), SAMPLING, progress=False)
        return {**rows, "answer": [result.outputs[0].text for result in results]}


def main(model: str, source: str, target: str, num_engines: int, num_threads: int) -> None:
    """Answer all rows of a file of JSON lines."""
    rows = ray.data.read_json(source, lines=True)
    settings = {"model": model, "num_threads": num_threads}
    answers = rows.map_batches(
        Answers, fn_constructor_kwargs=settings, concurrency=num_engines, num_cpus=num_threads, batch_size=256
    )
    answers.write_json(target)


if __name__ == "__main__":
    model, source, target, *numbers = sys.argv[1:]
    main(model, source, target, *map(int, numbers))
