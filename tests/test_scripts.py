"""Scripts that take minutes announce each step first."""

import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.mark.parametrize(
    ("script", "word"),
    [
        ("check-arm", "Cortex-A57"),
        ("clean-room", "debootstrap"),
        ("sanitize", "ThreadSanitizer"),
        ("try-agents", "its registry"),
        ("try-wheel", "user\nnamespaces"),
        ("wheel", "manylinux"),
    ],
)
def test_help_explains_and_does_nothing_else(script, word):
    done = subprocess.run([SCRIPTS / script, "--help"], capture_output=True, text=True, check=True, timeout=10)
    assert word in done.stdout
    assert done.stderr == ""
    assert not (SCRIPTS.parent / "--help").exists()
