"""The certificate that a server shows, and its key."""

from __future__ import annotations

import ssl

from moeflow.core.errors import ConfigError
from moeflow.server.config import ServerConfig


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the TLS context of a server; None: it speaks plain HTTP. Raises: ConfigError."""
    if config.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_certificate(context, config)
    return context


def load_certificate(context: ssl.SSLContext, config: ServerConfig) -> None:
    """Read certificate and key, also anew; connections that are open keep theirs. Raises: ConfigError."""
    assert config.tls_cert is not None, "only a server with TLS has a certificate"
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_refuse_password)
    except (OSError, ValueError) as error:  # SSLError is one of the former
        raise ConfigError(
            f"TLS cannot use the certificate {config.tls_cert} with the key {config.tls_key}: {error}; "
            "give a PEM certificate and its unencrypted key"
        ) from None


def _refuse_password() -> str:
    raise ValueError("the key is encrypted: decrypt it with `openssl pkey`")
