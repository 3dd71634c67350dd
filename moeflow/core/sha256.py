"""SHA-256 of what is small, as every start needs it, by Python's own code.

`hashlib` loads OpenSSL, which takes 3.5 MiB of memory for as long as the process lives; the standard library's `random`
goes past it in the same way. What is large is hashed several times as fast there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import sha256 as sha256
else:
    try:
        from _sha2 import sha256  # since Python 3.12
    except ImportError:
        try:
            from _sha256 import sha256  # in 3.11
        except ImportError:  # Python is built without either
            pass
