"""Which host names always mean this machine."""

from __future__ import annotations

import ipaddress


def is_loopback_name(host: str) -> bool:
    """Return whether a host name or address always means this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False
