"""Files made to hang, to fill memory or to raise raw exceptions are refused, by file and with a remedy, within bounds.

How long each case takes and how much memory is printed by `python -m tests.checkpoint.hostile`.
"""

from __future__ import annotations

import pytest

from tests.checkpoint.hostile import FOLDERS, MAX_BYTES, TOKENIZERS, VALID, Trials

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def trials():
    return Trials()


@pytest.mark.parametrize("maker", [*FOLDERS, *TOKENIZERS])
def test_it_is_refused(trials, tmp_path, maker):
    outcome = trials.run(maker, tmp_path)
    assert outcome.error == "CheckpointError", outcome.message
    assert (outcome.has_file, outcome.has_remedy) == (True, True)
    assert len(outcome.message) < 1500
    assert outcome.grown_bytes < MAX_BYTES
    assert outcome.cpu_s < 30  # far beyond the time of any: a bound for endless ones


@pytest.mark.parametrize("maker", VALID)
def test_what_is_sound_is_taken(trials, tmp_path, maker):
    outcome = trials.run(maker, tmp_path)
    assert outcome.error == "", outcome.message
