"""The secret that authenticates the processes of one cluster: a file that each machine has a copy of."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from moeflow.core.cache_dir import cache_folder
from moeflow.core.errors import ConfigError
from moeflow.kernels.on_demand import on_demand

with on_demand(__name__):
    import secrets
    import tempfile

_SECRET_BYTES: Final = 32
_MIN_CHARACTERS: Final = 16
_MAX_CHARACTERS: Final = 4096


def default_token_file(cache_dir: Path | None) -> Path:
    """Return the default path of the token."""
    return cache_folder(cache_dir) / "cluster-token"


def read_token(file: Path) -> bytes:
    """Return the secret. Raises: ConfigError if the file cannot be read, or holds no secret."""
    try:
        with file.open("rb") as stream:
            found = os.fstat(stream.fileno())
            token = stream.read(_MAX_CHARACTERS + 1).strip()
    except OSError as error:
        raise ConfigError(
            f"the cluster's token cannot be read from {file} ({error.strerror}): copy the head's file there, or name "
            "another (--cluster-token-file)"
        ) from None
    if not _MIN_CHARACTERS <= len(token) <= _MAX_CHARACTERS:
        raise ConfigError(
            f"the cluster's token in {file} has {len(token)} characters, where {_MIN_CHARACTERS} to {_MAX_CHARACTERS} "
            "are allowed: copy the head's file again, or delete it there to have a new one made"
        )
    # A file of root may be readable by its group, as Kubernetes mounts secrets of containers without root.
    if found.st_mode & (0o077 if found.st_uid else 0o037):
        raise ConfigError(f"others can read the cluster's token in {file}: run `chmod 600 {file}`")
    return token


def ensure_token(file: Path) -> bytes:
    """Return the secret; where there is no file, make one with a new secret, which only its owner can read.

    Raises: as `read_token`; ConfigError if the file cannot be made.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            _make(file)
    except OSError as error:
        raise ConfigError(f"the cluster's token cannot be written to {file} ({error.strerror})") from None
    return read_token(file)


def _make(file: Path) -> None:
    """Write a new secret atomically: another process that does so at this moment may win. Raises: OSError."""
    descriptor, name = tempfile.mkstemp(dir=file.parent)  # only its owner can read it
    try:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(secrets.token_hex(_SECRET_BYTES) + "\n")
        with suppress(FileExistsError):
            os.link(name, file)
    finally:
        os.unlink(name)
