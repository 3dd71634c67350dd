"""Files that readers see whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """Yield a temporary path, which replaces `file` at the end of the block, unless the block raises.

    Makes the folder. Raises: OSError.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        yield new
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
