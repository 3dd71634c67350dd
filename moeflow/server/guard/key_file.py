"""Reads a file of API keys: TOML, one table for each key, named after its user.

    [alice]
    key = "..."                   # or its SHA-256: sha256 = "64 hex digits"
    requests-per-minute = 60      # no limit without it
    tokens-per-minute = 100000    # prompts and answers

A message never repeats a key.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from moeflow.core.errors import ConfigError
from moeflow.core.untrusted import UnreadableError, parse_toml, read_bounded

SINGLE: Final = "api-key"  # the name of the key that --api-key sets
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_LIMITS = ("requests-per-minute", "tokens-per-minute")
_FIELDS = ("key", "sha256", *_LIMITS)
_MAX_LIMIT: Final = 10**12  # larger than any use, and exact as a float


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key, known by its SHA-256 alone, and its limits per minute."""

    name: str
    digest: bytes = field(repr=False)
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


def digest_of(key: bytes) -> bytes:
    """Return the SHA-256 of a key."""
    return hashlib.sha256(key).digest()


def read_key_file(path: Path) -> list[ApiKey]:
    """Return the keys in a file. Raises: ConfigError, naming the file and the key's name."""
    try:
        data = read_bounded(path)
    except UnreadableError as error:
        raise ConfigError(f"the file of API keys {path} cannot be read: {error}") from None
    try:
        tables = parse_toml(data)
    except UnreadableError as error:
        raise ConfigError(f"the file of API keys {path} is not valid TOML: {error}") from None
    keys = [_key_of(path, name, table) for name, table in tables.items()]
    if not keys:
        raise ConfigError(f"the file of API keys {path} has no key; add a table such as [alice] with key = '...'")
    _check_distinct(path, keys)
    return keys


def _key_of(path: Path, name: str, table: Any) -> ApiKey:
    if not _NAME.fullmatch(name) or name == SINGLE:
        raise ConfigError(
            f"{path}: a key's name must be 1 to 64 of A-Z a-z 0-9 . _ - and not {SINGLE!r}, not {name[:80]!r}"
        )
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {name} must be a table: write [{name}], and below it key = '...'")
    unknown = [field for field in table if field not in _FIELDS]
    if unknown:
        raise ConfigError(f"{path}: [{name}] has the unknown field {unknown[0][:80]!r}; known are {', '.join(_FIELDS)}")
    limits = [_limit(path, name, field, table.get(field)) for field in _LIMITS]
    return ApiKey(name, _digest(path, name, table), *limits)


def _digest(path: Path, name: str, table: dict[str, Any]) -> bytes:
    key, sha256 = table.get("key"), table.get("sha256")
    if (key is None) == (sha256 is None):
        raise ConfigError(f"{path}: [{name}] must have either key or sha256")
    if key is not None:
        if not isinstance(key, str) or not key.strip():
            raise ConfigError(f"{path}: key of [{name}] must be a text that is not empty")
        return digest_of(key.strip().encode())
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ConfigError(f"{path}: sha256 of [{name}] must be 64 hex digits, as `printf %s KEY | sha256sum` prints")
    digest = bytes.fromhex(sha256)
    if digest == digest_of(b""):
        raise ConfigError(f"{path}: sha256 of [{name}] is that of an empty key; give the digest of a key")
    return digest


def _limit(path: Path, name: str, field: str, value: Any) -> int | None:
    if value is not None and (type(value) is not int or not 1 <= value <= _MAX_LIMIT):
        raise ConfigError(
            f"{path}: {field} of [{name}] must be a whole number from 1 to {_MAX_LIMIT}; without it, no limit"
        )
    return value


def _check_distinct(path: Path, keys: list[ApiKey]) -> None:
    names: dict[bytes, str] = {}
    for key in keys:
        if key.digest in names:
            raise ConfigError(f"{path}: [{names[key.digest]}] and [{key.name}] have the same key; give each its own")
        names[key.digest] = key.name
