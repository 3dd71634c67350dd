"""SHA-256 of what is small, as every start needs it, by Python's own code.

`hashlib` loads OpenSSL, which takes 3.5 MiB of memory for as long as the process lives; the standard library's `random`
goes past it in the same way. What is large is hashed several times as fast there.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import hashlib

_MODULES: Final = ("_sha2", "_sha256", "hashlib")  # since Python 3.12; in 3.11; where Python is built without either


def sha256(content: bytes = b"") -> hashlib._Hash:
    """Return what `hashlib.sha256` does."""
    for name in _MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        made: hashlib._Hash = module.sha256(content)
        return made
    raise AssertionError("hashlib is always there")
