"""How the server listens and whom it lets in. Nothing here concerns the model or the engine."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from moeflow.core.errors import ConfigError
from moeflow.core.units import MIB

_MIN_BODY_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of one HTTP server.

    Raises: ConfigError, naming the setting, when a value cannot be granted.
    """

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    api_key: str | None = field(default=None, repr=False)  # None: everybody who can connect may ask
    allowed_hosts: tuple[str, ...] = ()  # names under which browsers may call, beside loopback's own
    max_queue: int = 64  # sequences that may wait beyond those running; more get 429
    max_body_bytes: int = 4 * MIB
    data_dir: Path | None = None  # where uploaded files and batch jobs are kept; None: there are none
    max_file_bytes: int = 200 * MIB  # of an upload; OpenAI's limit
    shutdown_deadline_s: float = 30.0  # after SIGTERM: how long running requests may still take

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be from 0 to 65535, not {self.port}")
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("api_key is empty; give a key, or leave it out to need none")
        if self.max_queue < 0:
            raise ConfigError(f"max_queue must be 0 or more, not {self.max_queue}")
        if self.max_body_bytes < _MIN_BODY_BYTES:
            raise ConfigError(f"max_body_bytes must be {_MIN_BODY_BYTES} or more, not {self.max_body_bytes}")
        if self.max_file_bytes < _MIN_BODY_BYTES:
            raise ConfigError(f"max_file_bytes must be {_MIN_BODY_BYTES} or more, not {self.max_file_bytes}")
        if not 0 <= self.shutdown_deadline_s < float("inf"):
            raise ConfigError(f"shutdown_deadline_s must be 0 or more seconds, not {self.shutdown_deadline_s}")

    @property
    def is_loopback(self) -> bool:
        """Whether only programs on this machine can connect."""
        return is_loopback_name(self.host)


def is_loopback_name(host: str) -> bool:
    """Return whether a host name or address always means this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
