"""Renders chat templates in a process of its own. A template comes with a model and is a program. It may loop for hours
or allocate gigabytes, so it must not run in the HTTP server's process.

Run as `python -m moeflow.text.template_process` with a socket as standard input, within `worker_limits`.
"""

from __future__ import annotations

import json
import socket

import msgspec

from moeflow.text.jinja_template import JinjaTemplate
from moeflow.text.template_messages import (
    MAX_REASON,
    Opening,
    Rendered,
    RenderRequest,
    Reply,
    TemplateFailed,
    TemplateRefused,
    TooLong,
    frame,
    receive,
)
from moeflow.text.worker_limits import MEMORY_BYTES, limit_cpu_time, run


def serve(connection: socket.socket) -> None:
    """Answer until the other side is gone, or until the template has failed."""
    raw = receive(connection)
    if raw is None:
        return
    opening = msgspec.msgpack.decode(raw, type=Opening)
    compiled = _compile(opening)
    while (raw := receive(connection)) is not None:
        reply = compiled if isinstance(compiled, TemplateFailed) else _render(compiled, raw)
        connection.sendall(frame(reply))
        if isinstance(reply, TemplateFailed):
            return


def _compile(opening: Opening) -> JinjaTemplate | TemplateFailed:
    limit_cpu_time()  # compiling evaluates constants, such as 'x' * 4000000000
    try:
        return JinjaTemplate(opening.template, opening.variables)
    except MemoryError:
        return _out_of_memory()
    except Exception as error:
        return TemplateFailed(f"cannot be compiled: {str(error)[:MAX_REASON]}")


def _render(template: JinjaTemplate, raw: bytes) -> Reply:
    limit_cpu_time()
    try:
        request = msgspec.msgpack.decode(raw, type=RenderRequest)
        text = template.render(
            msgspec.json.decode(request.messages),
            json.loads(request.tools),
            json.loads(request.variables),
            continues_last=request.continues_last,
        )
        num_bytes = len(text.encode())
        return Rendered(text) if num_bytes <= request.max_bytes else TooLong(num_bytes)
    except MemoryError:
        return _out_of_memory()
    except Exception as error:
        return TemplateRefused(str(error)[:MAX_REASON].encode(errors="replace").decode())


def _out_of_memory() -> TemplateFailed:
    return TemplateFailed(f"needs more than {MEMORY_BYTES // 2**20} MiB of memory")


def main() -> None:
    """Entry point of the process."""
    run(serve)


if __name__ == "__main__":
    main()
