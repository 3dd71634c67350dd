"""HOST:PORT, as people write it."""

from __future__ import annotations

from typing import Final

from moeflow.core.errors import ConfigError

Address = tuple[str, int]  # host and port

LOOPBACK: Final = "127.0.0.1"
EVERYWHERE: Final = ("0.0.0.0", "::")  # all addresses of this machine
_MAX_PORT: Final = 65535
_MAX_DIGITS: Final = 5


def parse_address(text: str, *, default_host: str = "") -> Address:
    """Return host and port of HOST:PORT or [IPV6]:PORT; of a port alone, if there is a `default_host`.

    Raises: ConfigError if it is neither.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") or ":" not in host else ""
    host = host or ("" if colon else default_host)
    is_port = port.isascii() and port.isdecimal() and len(port) <= _MAX_DIGITS and 1 <= int(port) <= _MAX_PORT
    if not host or not is_port:
        forms = "HOST:PORT or PORT" if default_host else "HOST:PORT"
        raise ConfigError(f"{text!r} is no address: write {forms}, with a port from 1 to {_MAX_PORT}")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """Return what `parse_address` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
