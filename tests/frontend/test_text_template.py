"""Chat templates render as Hugging Face's do, and can do nothing else."""

from __future__ import annotations

from datetime import datetime

import pytest

from holdfast.core.errors import Code, HoldfastError
from holdfast.frontend.text import template as template_module
from holdfast.frontend.text.template import TEMPLATES_MAX, Templates

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
HELLO = [{"role": "user", "content": "hello <b>"}]


def templates() -> Templates:
    return Templates(lambda: datetime(2031, 5, 17))


def refusal(source: str) -> HoldfastError:
    with pytest.raises(HoldfastError) as caught:
        templates().get(source).render(HELLO)
    assert caught.value.code is Code.INVALID_REQUEST
    return caught.value


def test_renders_chatml() -> None:
    """A common template gives the prompt its model was trained on, with and without the opening of the answer."""
    chat = templates().get(CHATML)
    assert chat.render(HELLO) == "<|im_start|>user\nhello <b><|im_end|>\n<|im_start|>assistant\n"
    assert chat.render(HELLO, add_generation_prompt=False) == "<|im_start|>user\nhello <b><|im_end|>\n"


def test_the_environment_templates_expect() -> None:
    """tojson escapes nothing, the date is the injected one, loop controls and generation blocks work."""
    source = (
        "{{ bos_token }}{{ messages | tojson }}{{ strftime_now('%d %b %Y') }}"
        "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% break %}{% endfor %}{{ flag }}"
    )
    text = templates().get(source).render(HELLO * 2, bos_token="<s>", flag="é")
    one = '{"role": "user", "content": "hello <b>"}'
    assert text == f"<s>[{one}, {one}]17 May 2031useré"


def test_a_template_can_refuse_messages() -> None:
    """raise_exception becomes a refusal with the template's own words, naming messages."""
    error = refusal("{{ raise_exception('roles must alternate') }}")
    assert "roles must alternate" in error.message
    assert "'messages'" in error.message


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].nothing.at_all }}",
        "{{ 1 // 0 }}",
        "{{ messages + 1 }}",
        "{{ messages['x'].y }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{% include 'x' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ range(10**9) | list }}",
        "{{ 'x'.encode() | tojson }}",
        "{% for x in",
        "{% generation %}",
        "{{ 'a' | nofilter }}",
    ],
)
def test_no_template_breaks_out_or_breaks_us(source: str) -> None:
    """Broken, hostile and confused templates are refusals by name."""
    refusal(source)


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that never ends its prompt is cut short."""
    monkeypatch.setattr(template_module, "PROMPT_CHARS_MAX", 1000)
    assert "more than 1000 characters" in refusal("{% for i in range(99999) %}{{ i }} {% endfor %}").message


def test_compiled_once_and_bounded() -> None:
    """The same source is the same template, and old ones leave."""
    store = templates()
    assert store.get(CHATML) is store.get(CHATML)
    first = store.get("first")
    for place in range(TEMPLATES_MAX):
        store.get(f"other {place}")
    assert store.get("first") is not first
