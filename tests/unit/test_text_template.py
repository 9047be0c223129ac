"""Chat templates: variables, limits, and that no template can hang the server or exhaust its memory."""

from __future__ import annotations

import datetime
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from luce.errors import LuceError, ModelError, RequestError, UnavailableError, UsageError
from luce.text.template import ChatTemplate
from luce.text.template_child import TemplateChild
from tests.support.daemons import within

HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, *, seconds: float = 10, **variables: Any) -> str:
    template = ChatTemplate(source, bos="<s>", eos="</s>", seconds=seconds)
    try:
        return template.render(HELLO if messages is None else messages, **variables)
    finally:
        template.close()


@pytest.fixture
def counting() -> Iterator[ChatTemplate]:
    """Loops `n` times, twice nested, then prints the variable."""
    source = "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}{{ n }}"
    template = ChatTemplate(source, seconds=1)
    yield template
    template.close()


def test_variables() -> None:
    source = (
        "{{ bos_token }}{{ messages[0].content }}{{ messages[0]['role'] }}{{ add_generation_prompt }}"
        "{{ tools is none }}{{ documents is none }}{{ x.y }}{{ absent is defined }}{{ eos_token }}{{ unk_token }}."
    )
    assert render(source, x={"y": 7}) == "<s>hellouserTrueTrueTrue7False</s>."


def test_fixed_variables_cannot_be_replaced_and_other_names_are_free() -> None:
    assert render("{{ bos_token }}{{ self_ }}{{ now }}", bos_token="x", self_=1, now=2) == "<s>12"
    template = ChatTemplate("{{ messages|length }}{{ strftime_now('%%') }}")
    assert template.render(HELLO, self=1, messages=[], strftime_now=3) == "1%"
    template.close()


def test_a_child_that_runs_already_is_asked() -> None:
    child = TemplateChild()
    template = ChatTemplate("{{ messages|length }}", child=child)
    assert template.process is child.process
    assert template.render(HELLO) == "1"
    template.close()
    assert child.process.returncode == -signal.SIGKILL


def test_white_space_is_as_templates_expect() -> None:
    source = "a\n  {% if true %}\nb\n  {% endif %}\nc\n"
    assert render(source) == "a\nb\nc"


def test_loop_controls_and_generation_marks() -> None:
    skip = "{% if i == 2 %}{% continue %}{% endif %}"
    source = "{% for i in [1, 2, 3] %}" + skip + "{% generation %}{{ i }}{% endgeneration %}{% endfor %}"
    assert render(source) == "13"


def test_json_keeps_order_and_characters() -> None:
    value = {"b": "<é'&>", "a": [1, 2.5, None, True]}
    assert render("{{ x|tojson }}", x=value) == '{"b": "<é\'&>", "a": [1, 2.5, null, true]}'
    assert render("{{ x|tojson(indent=2) }}", x={"b": 1, "a": 2}) == '{\n  "b": 1,\n  "a": 2\n}'
    assert render("{{ x|tojson(ensure_ascii=True) }}", x="é") == '"\\u00e9"'


def test_strings_arrive_unchanged() -> None:
    text = "\0\n\r\u2028\ue000é🙂\ud800'\"\\{{ 1 }}<|im_end|>"
    assert render("{{ messages[0].content }}", [{"role": "user", "content": text}]) == text


def test_the_date_is_the_server_s() -> None:
    before = datetime.date.today()
    assert before.isoformat() <= render("{{ strftime_now('%Y-%m-%d') }}") <= datetime.date.today().isoformat()


def test_refusals_of_the_template_reach_the_client() -> None:
    with pytest.raises(RequestError, match=r"^chat template: roles must alternate$") as caught:
        render("{{ raise_exception('roles must\n alternate') }}")
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[9].content }}", "list object has no element 9"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ absent|tojson }}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ range(10 ** 6) }}", "Range too big"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_failures_while_rendering_are_the_request_s(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=f"^chat template: .*{message}"):
        render(source)


@pytest.mark.parametrize("source", ["{% if %}", "{{ x|nofilter }}", "{% for %}", "{{ " + "(" * 10000, "{% set x"])
def test_syntax_errors_are_the_model_s_or_the_flag_s(source: str) -> None:
    with pytest.raises(ModelError, match=r"^tokenizer\.chat_template: .+"):
        ChatTemplate(source)
    with pytest.raises(UsageError, match=r"^--chat-template x\.jinja: .+"):
        ChatTemplate(source, origin="--chat-template x.jinja", error=UsageError)


def test_syntax_errors_name_the_line() -> None:
    with pytest.raises(ModelError, match="line 3: "):
        ChatTemplate("a\nb\n{% endif %}")


def test_variables_that_are_no_json_are_refused() -> None:
    template = ChatTemplate("x")
    circle: list[Any] = []
    circle.append(circle)
    for value in (b"x", {1, 2}, circle):
        with pytest.raises(RequestError, match="not a JSON value"):
            template.render(HELLO, x=value)
    template.close()


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__",
        "''['__class__']",
        "''|attr('__class__')",
        "messages.append(1)",
        "messages[0].update({})",
        "'{0.__class__}'.format('')",
        "'%s'.__mod__",
        "raise_exception.__globals__",
        "strftime_now.__self__",
        "self._TemplateReference__context",
        "cycler.__init__.__globals__.os.popen('id').read()",
        "lipsum.__globals__['os'].popen('id').read()",
        "joiner.__init__.__globals__.os",
        "namespace.__init__.__globals__.os",
        "(messages|map(attribute='__class__')|list)[0].mro()",
        "({}|attr).__globals__",
        "('' | attr('form' ~ 'at'))('{0.__class__}', '')",
    ],
)
def test_python_is_out_of_reach(expression: str) -> None:
    """Either refused or an undefined value, never anything of Python."""
    source = "{% set x = " + expression + " %}{{ 'reached' if x is defined and x is not none and x is not string }}"
    try:
        assert render(source) == ""
    except RequestError as error:
        assert "chat template: " in str(error)


def test_known_attack_on_unsandboxed_templates(tmp_path: Path) -> None:
    """CVE-2024-34359."""
    target = tmp_path / "reached"
    source = (
        "{% for x in ().__class__.__base__.__subclasses__() %}{% if 'warning' in x.__name__ %}"
        "{{ x()._module.__builtins__['__import__']('os').popen('touch " + str(target) + "').read() }}"
        "{% endif %}{% endfor %}"
    )
    with pytest.raises(RequestError, match="chat template"):
        render(source)
    assert not target.exists()


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ n ** (n ** n) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}",
        "{{ range(99999)|map('string')|map('center', 9999999)|map('length')|sum }}",
    ],
)
def test_templates_that_never_end_are_stopped(source: str) -> None:
    with pytest.raises(RequestError, match=r"^chat template: took longer than 1 s$"):
        render(source, seconds=1, n=10)


def test_constant_expressions_are_computed_within_the_limits_too() -> None:
    with pytest.raises(ModelError, match=r"took longer than 1 s"):
        ChatTemplate("{{ 10 ** (10 ** 10) }}", seconds=1)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * n ** n }}",
        "{{ [0] * n ** n }}",
        "{{ '%09999999999d' % n }}",
        "{{ '{:>9999999999}'.format(n) }}",
        "{{ 'a'|center(n ** n) }}",
        "{% set ns = namespace(x='a' * 999) %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{{ ((['a' * 9999 * n] * 9999 * n)|string)|length }}",
    ],
)
def test_values_that_fill_the_memory_are_refused(source: str) -> None:
    with pytest.raises(RequestError, match=r"^chat template: MemoryError"):
        render(source, n=10)


def test_the_output_is_bounded() -> None:
    source = "{% for i in range(9999) %}{{ 'a' * 1000 }}{% endfor %}"
    with pytest.raises(RequestError, match=r"^chat template: the result is longer than \d+ characters$"):
        render(source)
    content = "x" * 200_000
    assert len(render("{{ messages[0].content * 9 }}", [{"role": "user", "content": content}])) == 1_800_000


def test_the_next_conversation_works_after_one_was_stopped(counting: ChatTemplate) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match="took longer"):
            counting.render(HELLO, n=99999)
        assert counting.render(HELLO, n=3) == "3"


def test_a_child_that_was_killed_is_replaced(counting: ChatTemplate) -> None:
    os.kill(counting.process.pid, signal.SIGKILL)
    counting.process.wait()
    assert counting.render(HELLO, n=1) == "1"


def test_a_child_that_is_killed_meanwhile_fails_its_conversation_only() -> None:
    template = ChatTemplate("{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}", seconds=60)
    killer = threading.Timer(0.2, os.kill, (template.process.pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(RequestError, match="ended with status -9"):
        template.render(HELLO, n=99999)
    killer.join()
    assert template.render(HELLO, n=1) == ""
    template.close()


def test_a_child_that_hangs_is_replaced() -> None:
    template = ChatTemplate("{{ messages[0].content }}", seconds=0.5, patience=0.5)
    old = template.process
    for size in (1, 1 << 20):  # less and more than the pipe holds
        os.kill(template.process.pid, signal.SIGSTOP)
        assert template.render([{"role": "user", "content": "x" * size}]) == "x" * size
    assert old.returncode == -signal.SIGKILL and template.down() == ""
    template.close()


def test_a_child_that_hangs_twice_fails_one_conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 1000\n")
    sleeper.chmod(0o700)
    template = ChatTemplate("{{ messages[0].content }}", seconds=0.5, patience=0.5)
    os.kill(template.process.pid, signal.SIGSTOP)
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", str(sleeper))
        with pytest.raises(UnavailableError, match=r"^chat template: its process does not answer$") as caught:
            template.render(HELLO)
    assert caught.value.status == 503 and template.down() == "chat template: its process does not answer"
    assert template.render(HELLO) == "hello" and template.down() == ""
    template.close()


def test_a_template_whose_child_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(LuceError, match=r"^tokenizer\.chat_template: its process cannot be started: No such file"):
        ChatTemplate("x")


def test_the_child_outlives_the_thread_that_made_the_template() -> None:
    made: list[ChatTemplate] = []
    thread = threading.Thread(target=lambda: made.append(ChatTemplate("{{ messages[0].content }}")))
    thread.start()
    thread.join()
    process = made[0].process
    # A child that dies with that thread would be replaced.
    assert not within(0.5, lambda: process.poll() is not None)
    made[0].close()


# Holds a template whose child is stopped, and tells its id.
HOLDER = """
import os, signal, sys
from luce.text.template import ChatTemplate
template = ChatTemplate("x")
os.kill(template.process.pid, signal.SIGSTOP)
print(template.process.pid, flush=True)
sys.stdin.read()
"""


def test_a_stopped_child_dies_with_a_process_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        assert runs(child)
        holder.kill()
        assert within(60, lambda: not runs(child))


def test_a_child_ends_at_once_if_its_parent_has_ended_before() -> None:
    code = "from luce.ipc.parent import die_with_parent; die_with_parent({}); print('goes on')"
    for parent, shown in ((os.getpid(), b"goes on\n"), (1, b"")):
        command = [sys.executable, "-c", code.format(parent)]
        assert subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout == shown


def runs(pid: int) -> bool:
    """Whether a process is there, and no zombie that nobody waits for."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_conversations_at_the_same_time_do_not_mix() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    contents = [str(i) * (i % 7 * 1000) for i in range(60)]
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda content: template.render([{"role": "user", "content": content}]), contents)
        assert list(results) == contents
    template.close()


def test_the_child_ends_with_its_template() -> None:
    template = ChatTemplate("x")
    child = template.process
    template.close()
    template.close()
    assert child.returncode is not None
    assert template.render(HELLO) == "x"
    child = template.process
    del template
    gc.collect()
    assert child.returncode is not None


def test_the_child_sees_nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUCE_API_KEY", "secret")
    template = ChatTemplate("x")
    environment = Path(f"/proc/{template.process.pid}/environ").read_bytes()
    template.close()
    assert b"LUCE_API_KEY" not in environment
