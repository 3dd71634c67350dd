"""What a smaller weight format costs: perplexity, and how often the likeliest token stays the same.

The reference is the model in its own precision, or another file that it was made of. Both run through the real engine,
as they do when they serve. Predicts text token by token with the true text before it (perplexity, agreement). Then
continues a few prompts greedily. There the first different token ends the comparison, since the rest is another text.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.engine_config import EngineConfig
from moeflow.core.engine_messages import Submission, TokenLogprobs, TokenOutput
from moeflow.core.errors import ConfigError, EngineError
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.models.registry import read_model_config
from moeflow.planner.choices.offload_plan import costs_of
from moeflow.settings.settings import Settings
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.calibration_text import calibration_text
from moeflow.train.perplexity import WINDOW, windows

PROMPT_LEN = 48  # tokens of a prompt that is continued


@dataclass(frozen=True, slots=True)
class QualityTask:
    """What both formats are asked."""

    windows: list[list[int]]  # text whose tokens are predicted
    prompts: list[list[int]]  # to be continued
    new_tokens: int

    @property
    def num_steps(self) -> int:
        """How often `answer` reports progress."""
        return len(self.windows) + len(self.prompts)


@dataclass(slots=True)
class Answers:
    """What one format made of it."""

    logprobs: list[float] = field(default_factory=list)  # of each true token
    likeliest: list[int] = field(default_factory=list)  # at each of these places
    continuations: list[list[int]] = field(default_factory=list)


def in_own_precision(settings: Settings) -> Settings:
    """Return settings that lose nothing of the checkpoint's weights and choices. `settings.model` must name a path."""
    assert settings.model is not None
    with closing(open_checkpoint(settings.model)) as checkpoint:
        dtype = "bfloat16" if checkpoint.dtype == "bfloat16" else "float32"
    return dataclasses.replace(settings, dtype=dtype, quantize=None, kv_dtype="auto", capacity_factor=None)


def make_task(model_path: str, text: Path | None, *, num_prompts: int, new_tokens: int, seed: int) -> QualityTask:
    """Return the user's text, or the part of the bundled one that no router was fitted on, in windows.

    Raises: ConfigError if a file cannot be read or is too short.
    """
    texts = _texts(model_path, text)
    pieces = [list(piece) for token_ids in texts for piece in windows(token_ids, WINDOW)]
    rng = random.Random(seed)
    starts = [(rng.randrange(max(len(piece) - PROMPT_LEN, 1)), piece) for piece in _spread(pieces, num_prompts)]
    return QualityTask(pieces, [piece[start : start + PROMPT_LEN] for start, piece in starts], new_tokens)


def _texts(model_path: str, file: Path | None) -> list[list[int]]:
    encode = Tokenizer.load(model_path).encode
    if file is None:
        return calibration_text(encode).held_out
    split = calibration_text(encode, file)
    return [fitting + held_out for fitting, held_out in zip(split.fitting, split.held_out, strict=True)]


def _spread(pieces: Sequence[list[int]], count: int) -> list[list[int]]:
    """Return that many pieces from all over, each as often as any other, give or take one."""
    return [pieces[index * len(pieces) // count % len(pieces)] for index in range(count)]


def answer(config: EngineConfig, task: QualityTask, on_step: Callable[[], None]) -> Answers:
    """Load the model, do the task, forget the model.

    Raises: what loading raises; EngineError if a pass fails; ConfigError if the text does not fit.
    """
    need, limit = max(WINDOW, PROMPT_LEN + task.new_tokens), config.scheduler.max_model_len
    if need > limit:
        raise ConfigError(f"a request needs {need} tokens, but the engine allows {limit}: raise --max-model-len")
    answers = Answers()
    with closing(Engine.load(config)) as engine:
        for window in task.windows:
            (output,) = _run(engine, window, SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=1))
            tokens: list[TokenLogprobs] = [token for token in output.prompt_logprobs or () if token is not None]
            answers.logprobs += [token.logprob for token in tokens]
            answers.likeliest += [token.top[0][0] for token in tokens]
            on_step()
        greedy = SamplingParams(max_tokens=task.new_tokens, temperature=0.0, ignore_eos=True)
        for prompt in task.prompts:
            outputs = _run(engine, prompt, greedy)
            answers.continuations.append([token for output in outputs for token in output.token_ids])
            on_step()
    return answers


def _run(engine: Engine, prompt: list[int], sampling: SamplingParams) -> list[TokenOutput]:
    engine.submit(Submission("quality", prompt, sampling, seed=0))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    for output in outputs:
        if output.error is not None:
            raise EngineError(output.error)
    return outputs


def compare(reference: Answers, tested: Answers) -> dict[str, Any]:
    """Return the fields of a record. The change's error is the standard error over tokens, which are paired."""
    differences = [a - b for a, b in zip(reference.logprobs, tested.logprobs, strict=True)]
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    same = sum(a == b for a, b in zip(reference.likeliest, tested.likeliest, strict=True))
    prefixes = [_common_prefix(a, b) for a, b in zip(reference.continuations, tested.continuations, strict=True)]
    num_new = sum(map(len, reference.continuations))
    return {
        "num_tokens": len(differences),
        "reference_perplexity": math.exp(-statistics.fmean(reference.logprobs)),
        "perplexity": math.exp(-statistics.fmean(tested.logprobs)),
        "change_percent": 100 * math.expm1(mean),
        "change_error_percent": 100 * math.exp(mean) * error,
        "same_likeliest_share": same / len(differences),
        "num_prompts": len(prefixes),
        "num_new_tokens": num_new,
        "same_greedy_share": sum(prefixes) / num_new if num_new else None,
        "same_greedy_tokens": prefixes,
    }


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def describe_comparison(reference: EngineConfig, tested: EngineConfig) -> dict[str, Any]:
    """Return which models and formats were compared. Raises: CheckpointError."""
    with closing(open_checkpoint(tested.model_path)) as checkpoint:
        weight_bytes = int(costs_of(read_model_config(checkpoint), tested).model_bytes)
    return {
        "model": tested.model_name,
        "reference_model": reference.model_name,
        "reference_format": reference.weight_format,
        "reference_kv_dtype": reference.kv_dtype,
        "weight_format": tested.mix or tested.weight_format,
        "has_importance": bool(tested.importance_file),
        "weight_bytes": weight_bytes,
        "kv_dtype": tested.kv_dtype,
        "device": tested.device,
    }
