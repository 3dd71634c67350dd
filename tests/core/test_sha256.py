"""SHA-256 without OpenSSL: the digests of `hashlib`."""

import hashlib
import subprocess
import sys

import pytest

from moeflow.core.sha256 import sha256


@pytest.mark.parametrize("content", [b"", b"abc", bytes(range(256)) * 1000])
def test_digests_are_those_of_hashlib(content):
    assert sha256(content).hexdigest() == hashlib.sha256(content).hexdigest()
    digest = sha256()
    digest.update(content[:100])
    digest.update(content[100:])
    assert digest.hexdigest() == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(("has_own_code", "has_openssl"), [("", "False"), ("without", "True")])
def test_openssl_is_loaded_by_pythons_without_code_of_their_own_only(has_own_code, has_openssl):
    code = """
import sys
if sys.argv[1]: sys.modules |= {"_sha2": None, "_sha256": None}
from moeflow.core.sha256 import sha256
print(sha256(b"abc").hexdigest()[:8], "_hashlib" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code, has_own_code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["ba7816bf", has_openssl]
