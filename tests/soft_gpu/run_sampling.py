"""Samples on the processor and on the GPU in software, with every option, without and with token trees; prints JSON.

python -m tests.soft_gpu.run_sampling
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.soft_gpu import machine

machine.prepare()

from moeflow.core.batch import Batch  # noqa: E402
from moeflow.core.engine_config import EngineConfig  # noqa: E402
from moeflow.core.engine_messages import Submission, TokenLogprobs  # noqa: E402
from moeflow.core.sampling_params import SamplingParams  # noqa: E402
from moeflow.engine.engine import Engine  # noqa: E402
from moeflow.text.answer_form.answer_grammar import plain_grammar  # noqa: E402
from moeflow.text.answer_form.form import JsonForm  # noqa: E402
from studies.small_families import prompts_of, small_config, write_small  # noqa: E402
from tests.engine.test_speculation import Drafts  # noqa: E402
from tests.soft_gpu import device, kernels  # noqa: E402
from tests.tiny_mixtral import write_byte_tokenizer  # noqa: E402

FAMILY: Final = "qwen3_moe"
NUM_TOKENS: Final = 8
OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "greedy": {"temperature": 0.0},
    "min_p": {"min_p": 0.05},
    "top_k and top_p": {"top_k": 40, "top_p": 0.9},
    "repetition_penalty": {"temperature": 0.0, "repetition_penalty": 1.7},
    "presence and frequency": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "top_p": 0.8},
    "logit_bias": {"temperature": 0.0, "logit_bias": {7: 6.0, 8: -100.0}},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": [*range(2, 400)]},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
    "logprobs of changed logits": {"logprobs": 20, "logit_bias": {9: 4.0}, "min_p": 0.01},
    "form": {"grammar": plain_grammar(JsonForm({"type": "string"})), "logprobs": 2},
}


def main() -> None:
    """Print an object for each way."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_small(FAMILY, path, initializer_range=0.1, eos_token_id=1)
        write_byte_tokenizer(path, 512)
        expected, _ = _answers(small_config(path, "cpu", "float32"), None)
        found = {}
        for name, known in (("plain", None), ("trees", {each: tokens for each, (tokens, _) in expected.items()})):
            config = small_config(path, device.NAME, "float32")
            with device.soft_gpu(), kernels.soft_kernels():
                answers, passes = _answers(config, known)
            found[name] = {"different": _different(answers, expected), "passes": passes}
        print(json.dumps(found))


Answer = tuple[list[int], list[TokenLogprobs]]


def _answers(config: EngineConfig, known: Mapping[str, list[int]] | None) -> tuple[dict[str, Answer], list[Any]]:
    """Return tokens and log-probabilities of a request with each option, and the counts of passes without prompts.

    `known`: the tokens of answers, from which trees are drafted.
    """
    batches: list[Batch] = []
    engine = Engine.load(config, on_pass=batches.append)
    if known is not None:
        engine._speculation = Drafts(dict(known))  # type: ignore[assignment]
    answers: dict[str, Answer] = {name: ([], []) for name in OPTIONS}
    for prompt, (name, option) in zip(prompts_of([5 + n for n in range(len(OPTIONS))]), OPTIONS.items(), strict=True):
        params = SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 1.0, **option})
        engine.submit(Submission(name, prompt, params, seed=3))
    passes = []
    random.seed(0)
    while engine.has_work:
        device.COUNTS.clear()
        batches.clear()
        for output in engine.step():
            assert not output.error, output.error
            answers[output.request_id][0].extend(output.token_ids)
            answers[output.request_id][1].extend(output.logprobs or ())
        if batches and all(entry.request.num_computed_tokens > 0 for entry in batches[0].entries):
            num_drafted = sum(len(entry.tree) for entry in batches[0].entries)
            passes.append({"num_drafted": num_drafted, **device.COUNTS.report()})
    engine.close()
    return answers, passes


def _different(found: Mapping[str, Answer], expected: Mapping[str, Answer]) -> list[str]:
    """Return which options bring other tokens, or log-probabilities that are not nearly the same."""
    return [name for name in OPTIONS if not _is_same(*found[name], *expected[name])]


def _is_same(
    tokens: list[int], logprobs: list[TokenLogprobs], other_tokens: list[int], other: list[TokenLogprobs]
) -> bool:
    return (
        tokens == other_tokens
        and [(it.token_id, it.rank, [token for token, _ in it.top]) for it in logprobs]
        == [(it.token_id, it.rank, [token for token, _ in it.top]) for it in other]
        and all(
            abs(a - b) < 1e-4
            for one, two in zip(logprobs, other, strict=True)
            for a, b in zip([one.logprob, *dict(one.top).values()], [two.logprob, *dict(two.top).values()], strict=True)
        )
    )


if __name__ == "__main__":
    main()
