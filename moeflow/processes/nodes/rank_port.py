"""A port that one process of a machine after the other uses for links between ranks."""

from __future__ import annotations

import socket

from moeflow.core.address import Address
from moeflow.core.errors import ConfigError


class RankPort:
    """A free port, which the system gives to no other program until `close`."""

    def __init__(self, host: str) -> None:
        """Reserve one. A process that shares addresses, as ZeroMQ does, can listen at it. Raises: ConfigError."""
        try:
            found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
            family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
        except OSError as error:
            raise ConfigError(
                f"ranks cannot listen at {host}: {error.strerror}; name an address of this machine"
            ) from None
        self.address: Address = (host, self._socket.getsockname()[1])

    def close(self) -> None:
        """Give it back."""
        self._socket.close()


def own_host(server: str, port: int) -> str:
    """Return this machine's address in the network of a server. Raises: OSError if there is no such host."""
    found = socket.getaddrinfo(server, port, type=socket.SOCK_DGRAM)
    family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
        probe.connect(address)
        host: str = probe.getsockname()[0]
        return host
