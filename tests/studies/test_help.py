"""Every study that is a command has a help."""

from __future__ import annotations

import pytest

from tests.documents import ROOT
from tests.studies import running
from tests.studies.test_needs import studies


def is_command(study: str) -> bool:
    file = ROOT / study.replace(".", "/")
    return "run_study(" in (file / "__main__.py" if file.is_dir() else file.with_suffix(".py")).read_text()


@pytest.mark.parametrize("study", [study for study in studies() if is_command(study)])
def test_a_study_has_a_help(study):
    done = running.run(study, "--help")
    assert done.exit_code == 0, done.output
    assert "Usage: " in done.output
