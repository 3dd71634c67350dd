"""The gRPC side of a server: it runs in the event loop of HTTP, and its calls are requests to the same application."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Final

import grpc
import msgspec
from fastapi import FastAPI
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moeflow.core.errors import ConfigError, QueueFullError
from moeflow.server.config import ServerConfig
from moeflow.server.errors import ApiError, as_api_error
from moeflow.server.guard.strict_json import JsonError
from moeflow.server.listener import listen
from moeflow.server.rpc import moeflow_pb2
from moeflow.server.rpc.exchange import abort, exchange
from moeflow.server.rpc.health import Health
from moeflow.server.rpc.messages import answer_message, request_body, streamed_objects
from moeflow.server.service import Service

SERVICE: Final = moeflow_pb2.DESCRIPTOR.services_by_name["Moeflow"]
_PATHS: Final = {"CompletionRequest": "/v1/completions", "ChatRequest": "/v1/chat/completions"}
_COST: Final = 16  # reading a byte of a message takes as long as so many bytes of JSON
_IDLE_MS: Final = 300_000  # then a connection without calls ends
_HANDSHAKE_MS: Final = 20_000
Handler = Callable[[Any, Any], Awaitable[Message | None]]


class RpcServer:
    """Answers gRPC calls. `address` is known after the start."""

    def __init__(self, app: FastAPI, port: int, max_calls: int) -> None:
        """Port 0 is any free one. More than `max_calls` at once get RESOURCE_EXHAUSTED. So many connections may be
        open.
        """
        self._app = app
        self._service: Service = app.state.service
        self._port = port
        self._max_calls = max_calls
        self._certificate: Any = None  # to use from the next connection on; None: the one in use
        self.address = ""

    async def start(self) -> None:
        """Begin to answer. Raises: ConfigError if the port cannot be had, or the certificate cannot be used."""
        config = self._service.config
        options = (
            ("grpc.max_receive_message_length", config.max_body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # a second server on the port is an error
            ("grpc.max_allowed_incoming_connections", self._max_calls),
            ("grpc.max_connection_idle_ms", _IDLE_MS),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        )
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=self._max_calls)
        handlers = {method.name: self._handler(method) for method in SERVICE.methods}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))
        names = ("", SERVICE.full_name, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        health_pb2_grpc.add_HealthServicer_to_server(Health(self._service, names), self._server)
        self.address = self._bind(config)
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Take no more calls. End running calls after the grace."""
        await self._server.stop(grace_s)

    def reload(self) -> None:
        """Read the certificate again, for connections from now on. Raises: ConfigError."""
        if self._service.config.tls_cert is not None:
            self._certificate = _read_certificate(self._service.config)

    def _bind(self, config: ServerConfig) -> str:
        """Listen on the port; return the address."""
        with listen(config, self._port) as probe:  # names the problem of host or port
            host, chosen = probe.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        address = f"{host}:{chosen}"
        try:
            with _only_ipv4(host, chosen):
                port = self._add_port(config, address)
        except RuntimeError as error:
            raise ConfigError(
                f"gRPC cannot listen on {address}: {error}; choose another port with --grpc-port"
            ) from None
        return f"{host}:{port}"

    def _add_port(self, config: ServerConfig, address: str) -> int:
        if config.tls_cert is None:
            return int(self._server.add_insecure_port(address))
        credentials = grpc.dynamic_ssl_server_credentials(_read_certificate(config), self._next_certificate)
        return int(self._server.add_secure_port(address, credentials))

    def _next_certificate(self) -> Any:
        """Return a certificate that was read since the last connection; gRPC calls this in a thread for each."""
        certificate, self._certificate = self._certificate, None
        return certificate

    def _handler(self, method: MethodDescriptor) -> grpc.RpcMethodHandler:
        """Return a handler that reads the message itself, once the key has been checked."""
        make = (
            grpc.stream_stream_rpc_method_handler if method.server_streaming else grpc.stream_unary_rpc_method_handler
        )
        returned = GetMessageClass(method.output_type)
        answer = self._stream(method, returned) if method.server_streaming else self._whole(method, returned)
        return make(answer, None, returned.SerializeToString)

    def _whole(self, method: MethodDescriptor, kind: type[Message]) -> Handler:
        async def answer(_: Any, context: Any) -> Message:
            pieces: list[bytes] = []

            async def keep(piece: bytes) -> None:
                pieces.append(piece)

            await self._exchange(method, context, keep)
            return answer_message(kind, msgspec.json.decode(b"".join(pieces)))

        return answer

    def _stream(self, method: MethodDescriptor, kind: type[Message]) -> Handler:
        async def answer(_: Any, context: Any) -> None:
            async def write(piece: bytes) -> None:
                for chunk in streamed_objects(piece):
                    await context.write(answer_message(kind, chunk))

            await self._exchange(method, context, write)

        return answer

    async def _exchange(
        self, method: MethodDescriptor, context: Any, on_piece: Callable[[bytes], Awaitable[None]]
    ) -> None:
        path, read_body = _PATHS[method.input_type.name], partial(self._read_body, method, context)
        if failure := await exchange(self._app, context, path, read_body, on_piece):
            await abort(context, failure)

    async def _read_body(self, method: MethodDescriptor, context: Any) -> bytes:
        """Read the message of a call, and return it as JSON. Raises: ApiError 400, 429."""
        raw = await context.read()
        if raw is grpc.aio.EOF:
            raise ApiError(400, "invalid_value", "the call has no message; send one")
        large, kind = self._service.large_bodies, GetMessageClass(method.input_type)
        try:
            large.reserve(len(raw))
        except QueueFullError as error:
            raise as_api_error(error) from None
        try:
            return await large.read(_COST * len(raw), request_body, kind, raw, is_streamed=method.server_streaming)
        except JsonError as error:
            raise ApiError(400, "invalid_value", str(error)) from None
        finally:
            large.release(len(raw))


@contextlib.contextmanager
def _only_ipv4(host: str, port: int) -> Iterator[None]:
    """Take the port of IPv6 meanwhile: for 0.0.0.0, gRPC would listen on it too, and without it on IPv4 alone."""
    with contextlib.ExitStack() as held:
        if host == "0.0.0.0":
            with contextlib.suppress(OSError):  # IPv6 is missing, or another program has the port
                held.enter_context(socket.create_server(("::", port), family=socket.AF_INET6))
        yield


def _read_certificate(config: ServerConfig) -> Any:
    try:
        pair = tuple(path.read_bytes() for path in (config.tls_key, config.tls_cert) if path is not None)
    except OSError as error:
        raise ConfigError(f"the certificate {config.tls_cert} or its key cannot be read: {error}") from None
    return grpc.ssl_server_certificate_configuration([pair])
