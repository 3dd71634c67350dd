"""How the server listens and whom it lets in. Nothing here concerns the model or the engine."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from moeflow.core.errors import ConfigError
from moeflow.core.loopback import is_loopback_name
from moeflow.core.units import GIB, MIB
from moeflow.server.api.schema.left_out import Images, UnknownFields
from moeflow.server.logs import LogFormat, LogLevel

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+")  # schemes of apps and extensions, too
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")
_LEAST = {
    "num_fronts": 1,
    "max_queue": 0,
    "max_body_bytes": 1024,
    "max_file_bytes": 1024,
    "file_quota_bytes": 1024,
    "max_engine_restarts": 0,
}
_CHOICES = {
    "log_level": get_args(LogLevel),
    "log_format": get_args(LogFormat),
    "unknown_fields": get_args(UnknownFields),
    "images": get_args(Images),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of one server. Raises: ConfigError, naming the setting, when a value cannot be granted."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    grpc_port: int | None = None  # likewise; None: no gRPC
    api_key: str | None = field(default=None, repr=False)  # None and no file of keys: everybody may ask
    api_keys_file: Path | None = None  # keys with names and limits (guard/key_file.py)
    allowed_hosts: tuple[str, ...] = ()  # names under which browsers may call, beside loopback's own
    cors_origins: tuple[str, ...] = ()  # of web pages elsewhere that may use the API; "*": all
    tls_cert: Path | None = None  # the certificate with its chain, PEM; None: plain HTTP
    tls_key: Path | None = None
    forwarded_allow_ips: str | None = None  # proxies whose X-Forwarded-For and -Proto count, separated by commas
    root_path: str = ""  # the prefix that a proxy has removed from paths
    num_fronts: int = 1  # processes that answer HTTP, for the same engines
    max_queue: int = 64  # sequences that may wait beyond those running; more get 429
    max_body_bytes: int = 4 * MIB
    data_dir: Path | None = None  # where uploaded files and batch jobs are kept; None: there are none
    max_file_bytes: int = 200 * MIB  # of an upload; OpenAI's limit
    file_quota_bytes: int = 10 * GIB  # total of all files, results of jobs included
    shutdown_deadline_s: float = 30.0  # after SIGTERM: how long running requests may still take
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    otlp_endpoint: str | None = None  # base address of a collector of traces; None: as OTEL_... variables say, or none
    unknown_fields: UnknownFields = "refuse"  # for fields of requests that `api/schema/field_table.py` does not have
    images: Images = "results"  # where a text replaces images, which the model cannot see; it refuses all others
    log_prompts: bool = False  # whether requests' log lines hold their prompts
    max_engine_restarts: int = 100  # within an hour; one more death of the engine ends the server
    engine_timeout_s: float = 300.0  # an engine that does not answer for so long is started anew; 0: never

    def __post_init__(self) -> None:
        for name in ("port", "grpc_port"):
            if not 0 <= (getattr(self, name) or 0) <= 65535:
                raise ConfigError(f"{name} must be from 0 to 65535, not {getattr(self, name)}")
        if self.port and self.port == self.grpc_port:
            raise ConfigError(f"port and grpc_port are both {self.port}; give gRPC a port of its own")
        if self.otlp_endpoint is not None and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", self.otlp_endpoint):
            raise ConfigError(
                f"otlp_endpoint must be an address such as http://localhost:4318, not {self.otlp_endpoint!r}"
            )
        self._check_api_key()
        self._check_proxy()
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("TLS needs a certificate and its key: give both tls_cert and tls_key")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be {least} or more, not {getattr(self, name)}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        for name in ("shutdown_deadline_s", "engine_timeout_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} must be 0 or more seconds, not {getattr(self, name)}")

    def _check_api_key(self) -> None:
        if self.api_key is None:
            return
        if not self.api_key.strip():
            raise ConfigError("api_key is empty; give a key, or leave it out to need none")
        if not self.api_key.isprintable() or self.api_key != self.api_key.strip():
            raise ConfigError("api_key must be UTF-8 text without control characters or spaces around it")

    def _check_proxy(self) -> None:
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origin must be an origin without a path, such as https://app.example.org, or *, "
                    f"not {origin!r}"
                )
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(
                f"root_path must begin with a slash and not end with one, such as /llm, not {self.root_path!r}"
            )
        for address in filter(None, (self.forwarded_allow_ips or "").split(",")):
            try:
                if address.strip() != "*":
                    ipaddress.ip_network(address.strip())
            except ValueError as error:
                raise ConfigError(
                    f"forwarded_allow_ips must be IP addresses or networks separated by commas, or *: {error}"
                ) from None

    @property
    def needs_key(self) -> bool:
        """Whether clients must send a key."""
        return self.api_key is not None or self.api_keys_file is not None

    @property
    def is_loopback(self) -> bool:
        """Whether only programs on this machine can connect."""
        return is_loopback_name(self.host)
