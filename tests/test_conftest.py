"""Tests run alike however they are started."""

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_run_in_the_background_can_be_interrupted():
    """This one, too, runs with the handler that Python has in the foreground."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    script = 'trap \'\' INT; exec "$0" -m pytest -q "$1"'
    test = "tests/kernels/test_on_demand.py"
    subprocess.run(["sh", "-c", script, sys.executable, test], cwd=ROOT, check=True, capture_output=True)
