"""The offline API: a model in the caller's process. Prompts in, results out, with a progress bar.

Drives the same engine that serves, pass by pass, in the caller's thread; one generation at a time. Knows
nothing of asyncio.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from types import TracebackType
from typing import Self, Unpack

from moeflow.core.cache_dir import cache_folder
from moeflow.core.embedding_bytes import decode_embedding
from moeflow.core.engine_messages import NO_TOKENS, EngineStats, ModelInfo, Submission
from moeflow.core.errors import ConfigError, EngineError
from moeflow.core.plan import Plan
from moeflow.core.pooling_params import PoolingParams
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.admission import check_request, encode_prompt, make_submissions
from moeflow.engine.engine import Engine
from moeflow.engine.given_prompts import (
    Message,
    Params,
    Prompt,
    conversation_in,
    conversations_in,
    params_for_each,
    prompts_in,
)
from moeflow.engine.pooling_choice import check_pooling, classification
from moeflow.engine.results import CompletionOutput, RequestOutput
from moeflow.kernels.interrupts import hold_interrupts
from moeflow.kernels.on_demand import on_demand
from moeflow.llm_settings import LLMSettings
from moeflow.planner.planning import plan_for_start
from moeflow.planner.usage import OFFLINE
from moeflow.settings.names import named_as_fields
from moeflow.settings.settings import Settings
from moeflow.settings.values import read_settings
from moeflow.text.output_text import SequenceText, TextDelta
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.builtin import with_dense_source
from moeflow.train.making_process import make_builtin_apart

with on_demand(__name__):
    from rich import console
    from rich import progress as bars

    from moeflow.checkpoint.hub import local_models


class LLM:
    """A model that is ready to generate.

    `model` is a Hugging Face folder, a GGUF file, or the name of a model that `moeflow pull` has fetched; None is the
    built-in model, which is made at first use.
    The settings are fields of `moeflow.settings`: dtype, device, max_model_len, ... Names and values may be
    those of the command line, too: memory="4GiB" or memory_bytes=2**32, threads="2", cache_dir="~/models".
    `LLMSettings` has their types.
    `on_progress(done, total)` is called while the model is made or loaded.

    Unset options are chosen for this machine; `plan` has the choices, the forecast and the reasons.

    Use it in a `with` block, or close it, to free the memory.

    Raises: ConfigError, CheckpointError, CapacityError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        on_progress: Callable[[int, int], None] | None = None,
        **settings: Unpack[LLMSettings],
    ) -> None:
        self._load(plan_for_start(_make_settings(model, settings, on_progress), OFFLINE), on_progress)

    def _load(self, plan: Plan, on_progress: Callable[[int, int], None] | None) -> None:
        self.plan = plan
        self.tokenizer: Tokenizer = Tokenizer.load(plan.config.model_path)
        self._engine: Engine | None = Engine.load(plan.config, on_progress)
        self.model: ModelInfo = self._engine.model
        self._is_busy = False
        self._request_numbers = itertools.count()

    @classmethod
    def from_plan(cls, plan: Plan, on_progress: Callable[[int, int], None] | None = None) -> Self:
        """Load a finished plan. Raises: ConfigError if that is several engines; else as the class."""
        if plan.num_replicas > 1 or plan.node_replicas is not None:
            raise ConfigError(
                "the plan is for several engines (--replicas), or for ranks of other machines (--listen-ranks): "
                "`moeflow serve` and `moeflow batch` start these, and LLM is one engine in this process. Give the plan "
                "to these (--plan), or make one without them"
            )
        llm = cls.__new__(cls)
        llm._load(plan, on_progress)
        return llm

    def generate(
        self, prompts: str | Sequence[Prompt], sampling_params: Params = None, *, progress: bool = True
    ) -> list[RequestOutput]:
        """Complete one prompt or many, each text or token ids; results come in the order of the prompts.

        `sampling_params` holds for all prompts, or is a list with one for each. Ctrl-C stops the work and
        leaves the model usable.

        Raises: RequestError before anything runs, if one of the prompts can never run.
        """
        items = prompts_in(prompts)
        results = [RequestOutput(item if isinstance(item, str) else None, self._encode(item), []) for item in items]
        return self._run(results, sampling_params, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of {"role": ..., "content": ...}, or a list of conversations.

        Raises: RequestError if the model has no chat template, or as `generate`; ChatTemplateError if the model's
        template is broken, or takes more time or memory than it may.
        """
        prompts = [self._encode_chat(conversation) for conversation in conversations_in(messages)]
        return self._run([RequestOutput(None, prompt, []) for prompt in prompts], sampling_params, progress)

    def embed(
        self, prompts: str | Sequence[Prompt], pooling: PoolingParams | None = None, *, progress: bool = True
    ) -> list[list[float]]:
        """Return a vector of each prompt, text or token ids, made of the model's last hidden states.

        `pooling` None: as the model's files say, else of the last token, or in an encoder of all.

        Raises: RequestError before anything runs, if one of the prompts can never run.
        """
        return self._pool(prompts, check_pooling(self.model, pooling), progress)

    def classify(self, prompts: str | Sequence[Prompt], *, progress: bool = True) -> list[dict[str, float]]:
        """Return, for each prompt, the probability of each of the model's classes, by its label.

        Raises: RequestError before anything runs, if the model has no classes or one of the prompts can never run.
        """
        found = self._pool(prompts, classification(self.model), progress)
        return [dict(zip(self.model.labels, probabilities, strict=True)) for probabilities in found]

    def _pool(self, prompts: str | Sequence[Prompt], pooling: PoolingParams, progress: bool) -> list[list[float]]:
        items = prompts_in(prompts)
        requests = [(self._encode(item), NO_TOKENS) for item in items]
        for prompt, params in requests:
            check_request(self.model, prompt, params, pooling)
        vectors: list[list[float]] = [[] for _ in items]
        with _progress_bar(len(items), progress) as advance, closing(self._generate(requests, pooling)) as deltas:
            for number, delta in deltas:
                if delta.embedding is None:
                    raise EngineError(delta.error or "the request was cancelled")
                vectors[number] = decode_embedding(delta.embedding)
                advance(delta)
        return vectors

    def stream(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[TextDelta, None, None]:
        """Answer a conversation piece by piece. Closing the iterator stops the work.

        Raises: RequestError at once, if the request can never run.
        """
        (params,) = params_for_each(sampling_params, 1)
        prompt = self._encode_chat(conversation_in(messages))
        check_request(self.model, prompt, params)
        return self._stream(prompt, params)

    def stats(self) -> EngineStats:
        """Return what the engine has counted since it was loaded. Raises: EngineError if it is closed."""
        if self._engine is None:
            raise EngineError("this LLM is closed")
        return self._engine.stats()

    def close(self) -> None:
        """Free the model's memory; the object is of no use afterwards."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> list[int]:
        return encode_prompt(self.tokenizer, prompt, max_tokens=self.model.max_model_len)

    def _encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return self.tokenizer.apply_chat_template(messages, max_tokens=self.model.max_model_len)

    def _run(self, results: list[RequestOutput], sampling_params: Params, progress: bool) -> list[RequestOutput]:
        params = params_for_each(sampling_params, len(results))
        requests = [(result.prompt_token_ids, each) for result, each in zip(results, params, strict=True)]
        for prompt, each in requests:
            check_request(self.model, prompt, each)
        for result, each in zip(results, params, strict=True):
            result.outputs = [CompletionOutput(index) for index in range(each.n)]
        num_completions = sum(each.n for each in params)
        with _progress_bar(num_completions, progress) as advance, closing(self._generate(requests)) as deltas:
            for number, delta in deltas:
                results[number].add(delta)
                advance(delta)
        return results

    def _stream(self, prompt: list[int], params: SamplingParams) -> Generator[TextDelta, None, None]:
        with closing(self._generate([(prompt, params)])) as deltas:
            for _, delta in deltas:
                yield delta

    def _generate(
        self, requests: list[tuple[list[int], SamplingParams]], pooling: PoolingParams | None = None
    ) -> Generator[tuple[int, TextDelta], None, None]:
        """Yield (number of the request, delta) pass by pass; leaving early cancels what still runs."""
        engine = self._claim()
        live: dict[str, tuple[int, SequenceText]] = {}
        try:
            for number, (prompt, params) in enumerate(requests):
                name, defaults = f"llm-{next(self._request_numbers)}", self.model.sampling_defaults
                submissions = make_submissions(name, prompt, params, defaults=defaults, pooling=pooling)
                for index, submission in enumerate(submissions):
                    live[submission.request_id] = number, SequenceText(index, self.tokenizer, params)
                _submit(engine, submissions)
            while live:
                with hold_interrupts():
                    outputs = engine.step()
                assert outputs or engine.has_work, "the engine forgot a request"
                for output in outputs:
                    if output.request_id not in live:
                        continue  # ended by a stop string, or left over from a generation that was left early
                    number, text = live[output.request_id]
                    delta = text.push(output)
                    if delta.finish_reason is not None:
                        del live[output.request_id]
                        engine.cancel([output.request_id])  # a stop string ends it for us, not for the engine
                    yield number, delta
        finally:
            with hold_interrupts():
                engine.cancel(live)
            self._is_busy = False

    def _claim(self) -> Engine:
        if self._engine is None:
            raise EngineError("this LLM is closed")
        if self._is_busy:
            raise EngineError("this LLM is in the middle of another generation: finish it, or close its iterator")
        self._is_busy = True
        return self._engine


def _submit(engine: Engine, submissions: list[Submission]) -> None:
    with hold_interrupts():
        for submission in submissions:
            engine.submit(submission)


def _make_settings(
    model: str | os.PathLike[str] | None,
    settings: Mapping[str, object],
    on_progress: Callable[[int, int], None] | None,
) -> Settings:
    """Check names and values, and make the built-in model if no other is named."""
    values = read_settings(Settings, {**named_as_fields(settings), "model": model})
    if model is not None:
        values["model"] = local_models.local_path(str(values["model"]))
    else:
        values["model"] = str(make_builtin_apart(cache_folder(values.get("cache_dir")), on_progress))
    return with_dense_source(Settings(**values))


@contextmanager
def _progress_bar(num_completions: int, is_shown: bool) -> Iterator[Callable[[TextDelta], None]]:
    """Draw completions done and tokens a second on stderr; yield what takes each delta."""
    if not is_shown:
        yield lambda _: None
        return
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.fields[speed]:.1f} tokens/s"),
        bars.TimeElapsedColumn(),
    )
    num_tokens = 0
    with bars.Progress(*columns, console=console.Console(stderr=True)) as bar:
        task_id = bar.add_task("Generating", total=num_completions, speed=0.0)

        def advance(delta: TextDelta) -> None:
            nonlocal num_tokens
            num_tokens += len(delta.token_ids)
            elapsed_s = bar.tasks[0].elapsed or 0.0
            speed = num_tokens / elapsed_s if elapsed_s else 0.0
            bar.update(task_id, advance=delta.finish_reason is not None, speed=speed)

        yield advance
