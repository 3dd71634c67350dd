import pytest

from moeflow.cli import lazy


@pytest.fixture(autouse=True)
def logs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep verbs that run in this process from changing its loggers and its stderr."""
    monkeypatch.setitem(vars(lazy), "start_logs", lambda level, form: None)


@pytest.fixture
def little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `moeflow pack` learn a model's routing from little text: this saves seconds, and other tests cover the
    result."""
    from moeflow.train import routing_learning  # here, since most tests need no torch

    monkeypatch.setattr(routing_learning, "NUM_TOKENS", 200)
