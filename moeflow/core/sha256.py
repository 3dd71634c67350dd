"""SHA-256 of short data, in pure Python, for every start.

`hashlib` loads OpenSSL, which takes 3.5 MiB of memory for as long as the process lives; the standard library's `random`
goes past it in the same way. For long data, `hashlib` is several times as fast.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import sha256 as sha256
else:
    try:
        if sys.version_info >= (3, 12):
            from _sha2 import sha256 as sha256
        else:
            from _sha256 import sha256 as sha256
    except ImportError:  # Python is built without
        from hashlib import sha256 as sha256
