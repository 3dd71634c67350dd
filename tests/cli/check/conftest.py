from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from moeflow.core.engine_messages import Submission, TokenOutput
from moeflow.engine.generator import Generator
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from moeflow.text.tokenizer import Tokenizer
from tests.cli.check.recorded import Recording, run
from tests.server.live_server import serve_in_thread
from tests.server.walking_client import WalkingClient
from tests.tiny_mixtral import write_byte_tokenizer

KEY = "right"


class ByteModel(WalkingClient):
    """Its tokens are bytes, so calls and JSON may have more of them than those of other models."""

    async def stream(self, submission: Submission) -> AsyncIterator[TokenOutput]:
        sampling = submission.sampling
        if sampling.grammar:
            submission = msgspec.structs.replace(submission, sampling=dataclasses.replace(sampling, max_tokens=999))
        async for output in super().stream(submission):
            yield output


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return Tokenizer.load(folder)


@pytest.fixture(scope="session")
def checked(byte_tokenizer):
    """The results of all checks against the server of moeflow, and its answers."""
    recording = Recording()
    app = create_app(
        Generator(ByteModel(byte_tokenizer, max_model_len=4096), byte_tokenizer), ServerConfig(api_key=KEY)
    )
    with serve_in_thread(app) as url:
        return run(recording, url=url, key=KEY), recording.replies
