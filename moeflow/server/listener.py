"""The socket to listen on, taken before anything slow begins, so that a wrong host or port is known at once."""

from __future__ import annotations

import errno
import socket

from moeflow.core.errors import ConfigError
from moeflow.server.config import ServerConfig

_REMEDIES = {
    errno.EADDRINUSE: "the port is in use: stop the program that has it, or choose another with {option}",
    errno.EACCES: "the port is reserved: choose one of 1024 or above with {option}",
    errno.EADDRNOTAVAIL: "this machine does not have that address: use --host 127.0.0.1, or 0.0.0.0 for every network",
}


def listen(config: ServerConfig, grpc_port: int | None = None) -> socket.socket:
    """Return a listening socket, for HTTP or for the port of gRPC. Raises: ConfigError with the remedy."""
    port, option = (config.port, "--port") if grpc_port is None else (grpc_port, "--grpc-port")
    try:
        found = socket.getaddrinfo(config.host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"host {config.host!r} is unknown; give an address of this machine with --host") from None
    family, *_, address = min(found, key=lambda info: info[0] != socket.AF_INET)  # localhost means 127.0.0.1 first
    try:
        listener = socket.create_server(address[:2], family=family)
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, str(error)).format(option=option)
        raise ConfigError(f"cannot listen on {config.host} port {port}: {remedy}") from None
    # Connections inherit it. asyncio sets it only on sockets that name their protocol, unlike these. Without it, each
    # token of a stream would wait 40 ms for the client to acknowledge the previous packet.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url(listener: socket.socket, *, has_tls: bool = False) -> str:
    """Return the address to open in a browser on this machine."""
    scheme = "https" if has_tls else "http"
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
