"""Chat templates that loop, that fill memory, that break; and that nothing is left of what had to be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from moeflow.core.errors import ChatTemplateError, RequestError
from moeflow.text.chat_template import ChatTemplate

QUESTION = [{"role": "user", "content": "hi"}]
SHOWS_MESSAGES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LOOPS_FOR_LOOP = "{% if messages[0].content == 'loop' %}" + LOOPS + "{% endif %}" + SHOWS_MESSAGES
FILLS_FOR_FILL = "{% if messages[0].content == 'fill' %}{{ 'x' * (4000000000 + messages|length) }}{% endif %}fine"


@pytest.fixture
def make():
    made = []

    def make_template(source, **variables):
        made.append(ChatTemplate(source, variables))
        return made[-1]

    yield make_template
    for template in made:
        template.close()


def process_of(template):
    (process,) = template._processes._idle
    return psutil.Process(process._process.pid)


def ask(content):
    return [{"role": "user", "content": content}]


def is_gone(pid, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_one_process_renders_one_conversation_after_another(make):
    template = make("{{ bos_token }}" + SHOWS_MESSAGES, bos_token="<s>")
    assert template.render(QUESTION) == "<s>user: hi\n"
    first = process_of(template).pid
    long = "ü🙂" * 500_000
    assert template.render(ask(long)) == f"<s>user: {long}\n"
    assert process_of(template).pid == first


def test_the_process_is_there_before_it_is_needed(make):
    template = make(SHOWS_MESSAGES)
    template.warm_up()
    first = process_of(template).pid
    assert template.render(QUESTION) == "user: hi\n"
    assert process_of(template).pid == first


@pytest.mark.slow
def test_a_template_that_loops_is_stopped_and_the_next_conversation_is_rendered(make):
    template = make(LOOPS_FOR_LOOP)
    template.render(QUESTION)
    first = process_of(template).pid
    with pytest.raises(ChatTemplateError, match=r"needs too much processor time.*chat_template\.jinja"):
        template.render(ask("loop"))
    assert not psutil.pid_exists(first)
    assert template.render(QUESTION) == "user: hi\n"


def test_a_template_that_asks_for_gigabytes_fails_there_and_not_here(make):
    template = make(FILLS_FOR_FILL)
    template.render(QUESTION)
    first = process_of(template).pid
    with pytest.raises(ChatTemplateError, match="needs more than 512 MiB of memory"):
        template.render(ask("fill"))
    assert not psutil.pid_exists(first)
    assert template.render(QUESTION) == "fine"


def test_a_constant_of_gigabytes_is_not_evaluated_here_either(make):
    with pytest.raises(ChatTemplateError, match="needs more than 512 MiB"):
        make("{{ 'x' * 4000000000 }}").render(QUESTION)


def test_a_prompt_much_longer_than_its_messages_never_arrives(make):
    template = make("{{ 'x' * (messages[0].content | int) }}")
    assert len(template.render(ask("1000000"))) == 1_000_000
    with pytest.raises(ChatTemplateError, match=r"makes a prompt of 3000000 bytes of .. bytes of messages"):
        template.render(ask("3000000"))


@pytest.mark.parametrize("source", ["{% for m in messages %}", "{{ messages | shout }}"])
def test_a_template_that_is_no_program(make, source):
    template = make(source)
    for _ in range(2):
        with pytest.raises(ChatTemplateError, match="cannot be compiled"):
            template.render(QUESTION)


def test_what_a_template_refuses_is_the_requests_fault(make):
    template = make("{{ raise_exception('roles must alternate' + ' !' * messages|length) }}")
    with pytest.raises(RequestError, match="refuses the messages: roles must alternate !"):
        template.render(QUESTION)
    first = process_of(template).pid
    with pytest.raises(RequestError, match="alternate"):
        template.render(QUESTION)
    assert process_of(template).pid == first


def test_long_reasons_are_cut(make):
    with pytest.raises(RequestError) as caught:
        make("{{ raise_exception('x' * 1000000) }}").render(QUESTION)
    assert len(str(caught.value)) < 1000


def test_numbers_of_any_size_are_sent(make):
    assert make("{{ messages[0].data }}").render([{"data": [2**70, 0.5]}]) == f"[{2**70}, 0.5]"


@pytest.mark.parametrize("message", [{"content": "a\ud800"}, {"content": object()}])
def test_messages_that_cannot_be_sent(make, message):
    with pytest.raises(RequestError, match="not valid Unicode, or no JSON"):
        make(SHOWS_MESSAGES).render([{"role": "user", **message}])


def test_a_process_that_was_killed_while_idle_is_replaced(make):
    template = make(SHOWS_MESSAGES)
    template.render(QUESTION)
    first = process_of(template).pid
    os.kill(first, signal.SIGKILL)
    assert is_gone(first)
    assert template.render(QUESTION) == "user: hi\n"
    assert not psutil.pid_exists(first)


def test_no_process_is_left(make):
    closed, dropped = make(SHOWS_MESSAGES), ChatTemplate(SHOWS_MESSAGES, {})
    closed.render(QUESTION)
    dropped.render(QUESTION)
    pids = [process_of(template).pid for template in (closed, dropped)]
    closed.close()
    del dropped
    assert not any(psutil.pid_exists(pid) for pid in pids)


PARENT = """
import sys, threading
from moeflow.text.chat_template import ChatTemplate
template = ChatTemplate(sys.argv[1], {})
template.warm_up()
print(template._processes._idle[0]._process.pid, flush=True)
template.render([{"role": "user", "content": sys.argv[2]}])
threading.Event().wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("content", ["loop", "hi"])
def test_no_process_outlives_a_parent_that_is_killed(content):
    command = [sys.executable, "-c", PARENT, LOOPS_FOR_LOOP, content]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        time.sleep(0.5)  # into the loop, or past it
        parent.kill()
    assert is_gone(pid)


def test_the_process_is_small(make):
    template = make(SHOWS_MESSAGES)
    template.render(QUESTION)
    code = "import sys, moeflow.text.template_process; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"transformers", "tokenizers", "torch", "numpy", "asyncio", "zmq"} & set(loaded)
    assert process_of(template).memory_info().rss < 64 * 2**20
