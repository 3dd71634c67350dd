import sys

import pytest

from moeflow.kernels.on_demand import on_demand

SOURCE = """
import signal
signal.raise_signal(signal.SIGINT)
answer = 42
"""


def test_an_interrupt_while_a_module_is_imported_comes_after_it(tmp_path, monkeypatch):
    (tmp_path / "interrupted_module.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = on_demand("interrupted_module")
    with pytest.raises(KeyboardInterrupt):
        _ = module.answer
    assert sys.modules.pop("interrupted_module").answer == 42  # whole


def test_what_is_changed_in_a_module_is_seen(tmp_path, monkeypatch):
    (tmp_path / "changing_module.py").write_text("answer = 1", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = on_demand("changing_module")
    assert module.answer == 1
    monkeypatch.setattr(sys.modules["changing_module"], "answer", 2)
    assert module.answer == 2
    del sys.modules["changing_module"]
