"""Whether requests are traced: by an option, or by the variables that all programs with OpenTelemetry go by."""

from __future__ import annotations

import importlib.util
import os

from moeflow.core.errors import ConfigError

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def is_tracing_wanted(endpoint: str | None) -> bool:
    """Return whether spans are to be sent, to `endpoint` or to where the environment says.

    Raises: ConfigError if they are, and what sends them is not installed.
    """
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    is_off |= os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() == "none"
    named = "--otlp-endpoint" if endpoint else next((name for name in _ENDPOINTS if os.environ.get(name)), None)
    if named is None or is_off:
        return False
    if not all(map(_is_installed, _NEEDED)):
        raise ConfigError(f"traces of requests ({named}) need OpenTelemetry: run `pip install 'moeflow[otel]'`")
    return True


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package around it
        return False
