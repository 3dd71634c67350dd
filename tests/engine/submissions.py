"""Requests for an engine, run to their end."""

from __future__ import annotations

import pytest

from moeflow.core.engine_messages import Submission, TokenOutput
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine


def submission(name: str, prompt: list[int], **sampling) -> Submission:
    return Submission(name, prompt, SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **sampling}), seed=1)


def run(engine: Engine, limit: int = 5_000) -> dict[str, list[TokenOutput]]:
    outputs: dict[str, list[TokenOutput]] = {}
    for _ in range(limit):
        if not engine.has_work:
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
    pytest.fail("the engine does not come to an end")


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]
