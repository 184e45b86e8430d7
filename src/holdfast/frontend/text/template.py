"""Renders chat templates: messages to the prompt text a model was trained on.

A template comes with a model, so it runs in a sandbox: it can read only its arguments, and its output is bounded. It is
compiled once, because that takes 2.8 ms (facts 33). The environment is the one that Hugging Face's templates are
written for: trimmed blocks, loop controls, `raise_exception`, `strftime_now`, a plain `tojson`, and the `generation`
block, which marks training targets and has no effect here.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from holdfast.core.errors import Code, HoldfastError

# A million-token context is ~4 M characters; four times that can only come from a runaway template.
PROMPT_CHARS_MAX = 16_000_000

# A template's source is tens of kilobytes at most; a frontend serves a handful of models, each in one or two versions.
TEMPLATES_MAX = 64

# What evaluating a template's expressions over unexpected values can raise.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class _GenerationBlock(Extension):
    """Renders `{% generation %}…{% endgeneration %}` as its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and shape jinja2 asks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    __slots__ = ("_template",)

    def __init__(self, template: jinja2.Template) -> None:
        self._template = template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        bos_token: str = "",
        eos_token: str = "",
        **more: Any,
    ) -> str:
        """Return the prompt; raise HoldfastError(InvalidRequest) with the template's own message."""
        context = {
            **more,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": bos_token,
            "eos_token": eos_token,
        }
        try:
            return self._bounded(context)
        except _RENDER_ERRORS as error:
            raise _refused(f"the model's chat template refused 'messages': {_said(error)}") from error

    def _bounded(self, context: dict[str, Any]) -> str:
        pieces: list[str] = []
        room = PROMPT_CHARS_MAX
        for piece in self._template.generate(context):
            room -= len(piece)
            if room < 0:
                raise _refused(f"'messages' render to more than {PROMPT_CHARS_MAX} characters")
            pieces.append(piece)
        return "".join(pieces)


class Templates:
    """An LRU cache of compiled templates by source. `now` is the clock of `strftime_now`."""

    __slots__ = ("_environment", "_kept")

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._environment = _environment(now)
        self._kept: OrderedDict[str, ChatTemplate] = OrderedDict()

    def get(self, source: str) -> ChatTemplate:
        """Return the compiled template; raise HoldfastError(InvalidRequest) if the source is wrong."""
        template = self._kept.get(source)
        if template is not None:
            self._kept.move_to_end(source)
            return template
        try:
            template = ChatTemplate(self._environment.from_string(source))
        except (*_RENDER_ERRORS, SyntaxError) as error:
            raise _refused(f"the model's chat template does not compile: {_said(error)}") from error
        self._kept[source] = template
        if len(self._kept) > TEMPLATES_MAX:
            self._kept.popitem(last=False)
        return template


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode without escaping HTML, unlike jinja2's own filter: no model was trained on escaped HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _refused(message: str) -> HoldfastError:
    return HoldfastError(Code.INVALID_REQUEST, message)


def _said(error: BaseException) -> str:
    where = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return f"{str(error) or type(error).__name__}{where}"
