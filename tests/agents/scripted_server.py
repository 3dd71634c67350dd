"""The real server before a scripted model: only the choice of tokens is replaced.

HTTP, request schemas, chat template, tokenizer and answer readers are the server's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import msgspec

from moeflow.core.engine_messages import Submission
from moeflow.engine.generator import Generator
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from moeflow.text.tokenizer import Tokenizer
from tests.agents.recording import Exchange, Recorder
from tests.agents.templates import TemplateKind
from tests.engine.fakes import EOS, FakeEngine, byte_level_core, wrap
from tests.server.live_server import serve_in_thread
from tests.shapes import INFO

MODEL = "scripted"
CONTEXT = 2**20  # tokens: an agent's prompt and tools have about 100,000 bytes


def scripted_generator(template: TemplateKind, answer: Callable[[str], str], model: str = MODEL) -> Generator:
    """Return the text generator of a named model. `answer` maps a prompt's text to the model's answer."""
    tokenizer = wrap(byte_level_core(), eos_token="<|end|>", chat_template=template.source)
    info = msgspec.structs.replace(
        INFO, name=model, vocab_size=tokenizer.vocab_size, max_model_len=CONTEXT, eos_token_ids=(EOS,)
    )
    return Generator(FakeEngine(_rule(tokenizer, answer), info=info), tokenizer)


def _rule(tokenizer: Tokenizer, answer: Callable[[str], str]) -> Callable[[Submission, int], int]:
    """Return the rule that makes tokens of answers, each written once for its request."""
    answers: dict[str, list[int]] = {}

    def token(submission: Submission, position: int) -> int:
        if position == 0:
            text = answer(tokenizer.decode(submission.prompt_token_ids))
            answers[submission.request_id] = [*tokenizer.encode(text, add_special_tokens=False), EOS]
        return answers[submission.request_id][position]

    return token


@contextlib.contextmanager
def scripted_server(
    template: TemplateKind, answer: Callable[[str], str], model: str = MODEL
) -> Iterator[tuple[str, list[Exchange]]]:
    """Serve on a free loopback port. Yield the address and the exchanges with clients, which grow as they come."""
    exchanges: list[Exchange] = []
    with contextlib.closing(scripted_generator(template, answer, model)) as generator:
        app = create_app(generator, ServerConfig())
        app.add_middleware(Recorder, exchanges=exchanges)
        with serve_in_thread(app) as url:
            yield url, exchanges
