"""A server's folder for its socket, or for the ports of its engines. Only its user may enter it. The next start removes
a folder of a killed server.

The server holds a lock on the folder, which the kernel drops with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from moeflow.core.errors import ConfigError

_PREFIX = "moeflow-"
_OURS = re.compile(r"engine|http|token|replica-\d+(\.new)?")  # names of its files
_FRESH_S = 60.0  # a younger folder's server may not have taken its lock yet


class SocketFolder:
    """A folder that exists as long as its server."""

    def __init__(self) -> None:
        """Create it, and remove folders of killed servers. Raises: OSError."""
        remove_left_behind()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @property
    def address(self) -> str:
        """Where the socket is bound."""
        return f"ipc://{self.path}/engine"

    def unusable(self, reason: str) -> ConfigError:
        """Return the error for a socket that cannot be bound here."""
        remedy = "let TMPDIR name a folder of your own with a short path"
        return ConfigError(f"cannot make a socket in {self.path}: {reason}; {remedy}")

    def remove(self) -> None:
        """Remove it with the socket. May be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def remove_left_behind() -> None:
    """Remove this user's folders whose servers are gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another's, or removed by somebody else a moment ago
            _remove_if_left(folder)


def _remove_if_left(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        is_ours = status.st_uid == os.getuid() and all(map(_OURS.fullmatch, os.listdir(descriptor)))
        if is_ours and time.time() - status.st_mtime > _FRESH_S:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    finally:
        os.close(descriptor)
