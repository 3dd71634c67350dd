"""SHA-256 without OpenSSL: the digests of `hashlib`."""

import hashlib
import subprocess
import sys

import pytest

from moeflow.core import sha256 as module
from moeflow.core.sha256 import sha256


@pytest.mark.parametrize("content", [b"", b"abc", bytes(range(256)) * 1000])
def test_digests_are_those_of_hashlib(content):
    assert sha256(content).hexdigest() == hashlib.sha256(content).hexdigest()
    digest = sha256()
    digest.update(content[:100])
    digest.update(content[100:])
    assert digest.hexdigest() == hashlib.sha256(content).hexdigest()


def test_a_python_without_code_of_its_own_takes_hashlib(monkeypatch):
    monkeypatch.setattr(module, "_MODULES", ("_no_such_module", "hashlib"))
    assert sha256(b"abc").hexdigest() == hashlib.sha256(b"abc").hexdigest()


def test_openssl_is_not_loaded():
    code = "import sys; from moeflow.core.sha256 import sha256; sha256(b'abc'); print('_hashlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
