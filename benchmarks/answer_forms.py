"""What holding answers to a form costs: decode steps with a schema and without, of the same model, alternately.

    benchmarks/answer_forms.py [--model FOLDER] [--batch 1 8] [--tokens 64] [--rounds 9]

Prints the fastest round of each and their ratio. Figures need a quiet machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from moeflow import LLM, SamplingParams  # noqa: E402
from moeflow.engine.text.answer_form.answer_grammar import plain_grammar  # noqa: E402
from moeflow.engine.text.answer_form.form import JsonForm  # noqa: E402

ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kind": {"enum": ["a", "b"]}, "size": {"type": "number"}},
    "required": ["name", "kind", "size"],
    "additionalProperties": False,
}
FORM = plain_grammar(JsonForm({"type": "array", "items": ITEM, "minItems": 1000}))  # longer than any answer here


def step_s(llm: LLM, batch: int, num_tokens: int, grammar: str) -> float:
    """Return the seconds of one decode step: of a long answer without those of its first token."""
    times = []
    for count in (1, num_tokens):
        params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=1.0, seed=0, grammar=grammar)
        start = time.perf_counter()
        llm.generate([[1, 5, 7]] * batch, params, progress=False)
        times.append(time.perf_counter() - start)
    return (times[1] - times[0]) / (num_tokens - 1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the built-in model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with LLM(arguments.model, max_num_seqs=max(arguments.batch)) as llm:
        for batch in arguments.batch:
            found: dict[str, list[float]] = {"": [], FORM: []}
            for _ in range(arguments.rounds):
                for grammar, times in found.items():
                    times.append(step_s(llm, batch, arguments.tokens, grammar))
            plain, formed = (min(times) for times in found.values())
            print(f"batch {batch}: {plain * 1e3:.2f} ms a step, with a schema {formed * 1e3:.2f}: {formed / plain:.3f}")


if __name__ == "__main__":
    main()
