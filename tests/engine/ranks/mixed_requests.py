"""Requests that mix prompts in chunks with decodes, reuse prefixes and are preempted, with their answers."""

from __future__ import annotations

import dataclasses

from moeflow.core.engine_messages import Submission
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings

LONG = [(7 * index) % 250 + 2 for index in range(90)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
DRAWN = SamplingParams(max_tokens=24, ignore_eos=True, top_p=0.9, logprobs=1, prompt_logprobs=1)
ASKED = [
    Submission("long", LONG, DRAWN, seed=1),
    Submission("same prefix", LONG[:70], GREEDY, seed=2),
    Submission("short", [5], DRAWN, seed=3),
    Submission("other", LONG[30:60], GREEDY, seed=4),
]
NUM_BLOCKS = 10  # of 16 tokens: for one long request, and little else


def resolved(model, **settings):
    """Return a plan for passes of a part of a prompt."""
    settings = {"num_threads": 1, "max_num_batched_tokens": 48, "max_num_seqs": 4, "max_model_len": 160} | settings
    return resolve(Settings(model=model, **settings))


def config_of(model, *, num_blocks=NUM_BLOCKS, **settings):
    """Return a configuration with so many blocks."""
    config = resolved(model, **settings).config
    return dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, num_blocks=num_blocks))


def run(config):
    """Return what each request got, how often one was preempted, tokens that were cached, and statistics."""
    engine = Engine.load(config)
    try:
        for submission in ASKED:
            engine.submit(submission)
        found = {submission.request_id: [] for submission in ASKED}
        num_cached = 0
        while engine.has_work:
            for output in engine.step():
                assert output.error is None
                num_cached += output.num_cached_tokens
                found[output.request_id].append((output.token_ids, output.logprobs, output.prompt_logprobs))
            engine.check_integrity()
        stats = engine.stats()
        return (found, stats.preemptions_total, num_cached), stats
    finally:
        engine.close()
