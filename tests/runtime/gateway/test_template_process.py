"""Templates that would use up the gateway are ended, whether they do it in Python, in one call into C, or in memory."""

import os
import signal
import time

import pytest

from stoker.runtime.gateway import confined_process
from stoker.runtime.gateway.chat_template import ChatTemplate, TemplateRefused, template_source
from stoker.runtime.gateway.template_process import IsolatedTemplate

MESSAGES = [{"role": "user", "content": "<Grüße> \ud83d\n"}, {"role": "assistant", "content": None}]
MOST_S = 60
LONGER = "longer than 2 s"
ENDED = LONGER + "|MemoryError|memory|more than"
HOSTILE = [
    "{{ (7 ** 12000000) % 10 }}",
    "{{ (7 ** (messages|length * 12000000)) % 10 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 3000000000 }}",
    "{{ ('a' * (messages|length * 3000000000))|length }}",
    "{{ '%3000000000d' % 1 }}",
    "{{ 'a'|center(3000000000) }}",
    "{{ [[1] * 9999] * 99999 }}",
    "{% set n = namespace(a='aa') %}{% for i in range(40) %}{% set n.a = n.a ~ n.a %}{% endfor %}{{ n.a }}",
    "{{ 'a' * 20000000 }}",
]
MISTAKES = {
    "{{ 1 / 0 }}": "division by zero",
    "{{ 1 % (messages|length - messages|length) }}": "ZeroDivisionError",
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}": "RecursionError",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "RecursionError",
    "{% include 'other' %}": "loader",
    "{{ messages[7].content.x }}": "no element",
    "{{ raise_exception('roles must alternate') }}": "^roles must alternate$",
    "{% if %}": "broken",
}


@pytest.mark.parametrize("source", HOSTILE)
def test_a_hostile_template_ends_alone(source: str) -> None:
    began = time.monotonic()
    with pytest.raises(TemplateRefused, match=ENDED):
        IsolatedTemplate(source, {}).render(MESSAGES)
    assert time.monotonic() - began < MOST_S


@pytest.mark.parametrize("kind", [ChatTemplate, IsolatedTemplate])
@pytest.mark.parametrize("source", MISTAKES)
def test_every_mistake_is_a_refusal_that_says_so(kind: type[ChatTemplate], source: str) -> None:
    with pytest.raises(TemplateRefused, match=MISTAKES[source]):
        kind(source, {}).render([])


def test_constants_are_not_calculated_while_it_compiles() -> None:
    began = time.process_time()
    ChatTemplate(
        "{{ (7 ** 12000000) % 10 }}{% if (7 ** 12000000) % 10 == 1 %}{{ 'a'|center(3000000000) }}{% endif %}", {}
    )
    assert time.process_time() - began < 5


@pytest.mark.parametrize("config", [{"chat_template": 7}, {"chat_template": [{"name": "default"}]}])
def test_a_template_that_is_no_text_is_refused(config: dict[str, object]) -> None:
    with pytest.raises(TemplateRefused, match="chat template"):
        template_source(config, None)
    with pytest.raises(TemplateRefused, match="can't be read"):
        template_source({}, b"\xff")


def test_it_renders_as_in_the_gateway() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% endfor %}{{ tools | tojson }}{{ add_generation_prompt }}"
    )
    tokens, tools = {"bos_token": "<s>"}, [{"type": "function", "function": {"name": "f"}}]
    assert IsolatedTemplate(source, tokens).render(MESSAGES, tools) == ChatTemplate(source, tokens).render(
        MESSAGES, tools
    )


def test_it_goes_on_after_a_refusal_an_idle_end_and_a_time_limit() -> None:
    source = "{% if messages %}{{ (7 ** 12000000) % 10 }}{% endif %}{{ 'x' if tools else raise_exception('none') }}"
    template, tools = IsolatedTemplate(source, {}), [{}]
    for _ in range(2):
        with pytest.raises(TemplateRefused, match="none"):
            template.render([])
        assert template.render([], tools) == "x"
        process = template._confined._process
        assert process is not None
        process.send_signal(signal.SIGALRM)
        process.wait(10)
        assert template.render([], tools) == "x"
        with pytest.raises(TemplateRefused, match=LONGER):
            template.render(MESSAGES)


def test_its_process_knows_no_secrets_and_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    template = IsolatedTemplate("x", {})
    assert template._confined._process is not None
    pid = template._confined._process.pid
    with open(f"/proc/{pid}/environ", "rb") as environ:
        assert b"hush" not in environ.read()
    del template
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_idle_process_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = "from stoker.runtime.gateway import confined_child, template_child"
    code = f"{imported}; confined_child.IDLE_S = 0.2; template_child.main()"
    monkeypatch.setattr(confined_process, "COMMAND", (confined_process.COMMAND[0], "-c", code))
    template = IsolatedTemplate("x", {})
    assert template._confined._process is not None
    assert template._confined._process.wait(20) == -signal.SIGALRM
    assert template.render([]) == "x"
