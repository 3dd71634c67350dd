"""Whether requests are traced: by an option, or by the variables that all programs with OpenTelemetry go by."""

from __future__ import annotations

import os

from moeflow.server.extras import require_extra

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
    require_extra("otel", _NEEDED, f"traces of requests ({named}) need OpenTelemetry")
    return True
