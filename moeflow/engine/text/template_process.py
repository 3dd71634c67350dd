"""Renders chat templates in a process of its own. A template comes with a model and is a program: it may loop for
hours or ask for gigabytes, and what happens then must happen elsewhere than in the process that speaks HTTP.

Run as `python -m moeflow.engine.text.template_process` with a socket as standard input. The limits are the kernel's, so
they hold also when the parent is gone: too much processor time is a SIGXCPU, too much memory a MemoryError. An idle
process ends when the parent closes the socket.
"""

from __future__ import annotations

import resource
import signal
import socket
import time

import msgspec

from moeflow.engine.text.jinja_template import JinjaTemplate
from moeflow.engine.text.template_messages import (
    MAX_REASON,
    Failed,
    Opening,
    Refused,
    Rendered,
    RenderRequest,
    Reply,
    TooLong,
    frame,
    receive,
)

CPU_S = 2  # for one conversation, and a second more or less: the kernel counts whole ones
MEMORY_BYTES = 512 * 2**20  # of address space; an idle process has some 30 MiB


def serve(connection: socket.socket) -> None:
    """Answer until the other side is gone, or until the template has failed."""
    raw = receive(connection)
    if raw is None:
        return
    opening = msgspec.msgpack.decode(raw, type=Opening)
    compiled = _compile(opening)
    while (raw := receive(connection)) is not None:
        reply = compiled if isinstance(compiled, Failed) else _render(compiled, raw)
        connection.sendall(frame(reply))
        if isinstance(reply, Failed):
            return


def _compile(opening: Opening) -> JinjaTemplate | Failed:
    _limit_cpu_time()  # compiling evaluates constants, such as 'x' * 4000000000
    try:
        return JinjaTemplate(opening.template, opening.variables)
    except MemoryError:
        return _out_of_memory()
    except Exception as error:
        return Failed(f"cannot be compiled: {str(error)[:MAX_REASON]}")


def _render(template: JinjaTemplate, raw: bytes) -> Reply:
    _limit_cpu_time()
    try:
        request = msgspec.msgpack.decode(raw, type=RenderRequest)
        text = template.render(request.messages)
        num_bytes = len(text.encode())
        return Rendered(text) if num_bytes <= request.max_bytes else TooLong(num_bytes)
    except MemoryError:
        return _out_of_memory()
    except Exception as error:
        return Refused(str(error)[:MAX_REASON].encode(errors="replace").decode())


def _out_of_memory() -> Failed:
    return Failed(f"needs more than {MEMORY_BYTES // 2**20} MiB of memory")


def _limit_cpu_time() -> None:
    """Allow so much from now on; what was used before is counted, too."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + CPU_S, hard))


def main() -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # which a SIGXCPU would leave behind
    with socket.socket(fileno=0) as connection:
        serve(connection)


if __name__ == "__main__":
    main()
