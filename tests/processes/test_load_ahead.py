"""An engine process loads ahead what answers with a form need, once no request is left that this could hold up."""

from __future__ import annotations

from contextlib import closing

import msgspec
import pytest

from moeflow.core.engine_messages import Shutdown, Submission
from moeflow.core.sampling_params import SamplingParams
from moeflow.processes.main import EngineProcess
from moeflow.processes.pass_record import PassRecord, make_descriptor
from tests.engine.fake_runner import make_engine

NUM_TOKENS = 5


class Socket:
    """Brings one message each time that the engine has no work."""

    def __init__(self, engine, messages) -> None:
        self._engine, self._messages = engine, list(messages)

    def poll(self, timeout_ms: int) -> bool:
        return bool(self._messages) and not self._engine.has_work

    def recv(self) -> bytes:
        return msgspec.msgpack.encode(self._messages.pop(0))

    def send(self, message: bytes) -> None:
        assert message


@pytest.mark.parametrize("num_requests", [0, 1, 2])
def test_it_loads_between_requests(monkeypatch, num_requests):
    engine, _ = make_engine()
    events = []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: events.append("step" if engine.has_work else "idle") or step())
    monkeypatch.setattr(engine, "load_ahead", lambda: events.append("load"))
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
    requests = [Submission(f"r{i}", [5, 6, 7], sampling, seed=0) for i in range(num_requests)]
    socket = Socket(engine, [*requests, Shutdown(deadline_s=60.0)])
    with closing(engine), closing(PassRecord(make_descriptor(4))) as record:
        EngineProcess(socket, record)._serve(engine)
    assert "".join(event[0] for event in events).rstrip("i") == ("s" * NUM_TOKENS + "l") * num_requests
