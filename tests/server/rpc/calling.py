"""A gRPC server around an application, and a client of it, in one event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from fastapi import FastAPI
from google.protobuf.message_factory import GetMessageClass

from moeflow.server.rpc.rpc_server import SERVICE, RpcServer


class Caller:
    """Calls methods by their names, as a generated stub does."""

    def __init__(self, channel: Any, address: str = "") -> None:
        self.channel = channel
        self.address = address

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = SERVICE.methods_by_name[name]
        make = self.channel.unary_stream if method.server_streaming else self.channel.unary_unary
        given, returned = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        path = f"/{SERVICE.full_name}/{name}"
        return make(path, request_serializer=given.SerializeToString, response_deserializer=returned.FromString)


@asynccontextmanager
async def calling(app: FastAPI, *, max_calls: int = 100) -> AsyncIterator[Caller]:
    server = RpcServer(app, 0, max_calls)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield Caller(channel, server.address)
    finally:
        await server.stop(0)
