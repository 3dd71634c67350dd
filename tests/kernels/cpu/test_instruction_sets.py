"""Which instruction set is chosen, beyond what the processor has."""

import subprocess
import sys

import pytest

from moeflow.kernels.cpu import extension

# Linux refuses the registers of AMX to a process with a thread whose signal stack is too small for them.
SMALL_STACK_FOR_SIGNALS = """
import ctypes

class Stack(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

room = ctypes.create_string_buffer(4096)
stack = Stack(ctypes.addressof(room), 0, len(room))
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
from moeflow.kernels.cpu import extension
print(extension.isa_name())
"""


@pytest.mark.skipif(
    not extension.is_available() or extension.best_isa("") != "amx", reason="this processor or system has no AMX"
)
def test_where_the_system_refuses_amx_the_one_below_is_used():
    command = [sys.executable, "-c", SMALL_STACK_FOR_SIGNALS]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "avx512_bf16\n"
