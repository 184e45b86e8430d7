"""POST /v1/chat/completions: its messages and its logprobs.

Always true: a message that comes out has a role a chat template knows and its content as one string; how much
rendering the messages can cost is bounded by their number.
"""

from __future__ import annotations

from typing import Any

from holdfast.frontend.api.checks import Check, boolean, integer, wrong_type
from holdfast.frontend.api.errors import invalid
from holdfast.frontend.api.fields import SHARED, TOP_LOGPROBS_MAX, tools
from holdfast.frontend.api.parse import read_fields, require, settle
from holdfast.frontend.api.request import ParsedRequest

# Messages and their parts, together. A template costs 2-4 us for each on the event loop: 8 ms at worst, where no
# other stream may be delayed by more than 20 ms.
MESSAGES_AND_PARTS_MAX = 2048

# A developer message is what newer clients call a system message; models' templates know only the latter.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

# Given to the template, by the name it has there: what reasoning is called changed once, and templates know the old.
_TEXT_FIELDS = {"name": "name", "reasoning_content": "reasoning_content", "reasoning": "reasoning_content"}
# What an answer carries when sent back, and marks for caches and traces.
_IGNORED_FIELDS = frozenset({"annotations", "cache_control", "id", "metadata", "reasoning_details", "refusal"})
_REFUSED_FIELDS = frozenset({"tool_calls", "tool_call_id", "function_call", "audio"})


def parse_chat(body: bytes, *, thorough: bool = False) -> ParsedRequest:
    """A chat request, or ApiError(400)."""
    fields = read_fields(body, _TABLE, thorough=thorough)
    require(fields, "messages")
    top = fields.pop("_top_logprobs", None)
    if fields.pop("_logprobs", False):
        fields["top_logprobs"] = top or 0
    elif top is not None:
        raise invalid("top_logprobs", "'top_logprobs' is only allowed with 'logprobs': true")
    _settle_tools(fields)
    return ParsedRequest(kind="chat", **settle(fields))


def _settle_tools(fields: dict[str, Any]) -> None:
    """Tools that may not be called change nothing, and clients that end a tool's turn send them along."""
    offered, choice = fields.pop("_tools", False), fields.pop("_tool_choice", None)
    if offered and choice != "none":
        message = "'tools' are not supported unless 'tool_choice' is \"none\""
        raise invalid("tools", message, "unsupported_parameter")
    if choice not in (None, "none", "auto"):  # without tools, auto is none
        raise invalid("tool_choice", "'tool_choice' is not supported other than \"none\"", "unsupported_parameter")


def _messages(value: Any, path: str) -> list[dict[str, Any]]:
    if type(value) is not list:
        raise wrong_type(path, "an array of messages", value)
    if not value:
        raise invalid(path, f"'{path}' must have at least one message")
    room = MESSAGES_AND_PARTS_MAX - len(value)
    messages = []
    for place, message in enumerate(value):
        if type(message) is dict and type(content := message.get("content")) is list:
            room -= len(content)
        if room < 0:
            raise invalid(path, f"'{path}' must have at most {MESSAGES_AND_PARTS_MAX} messages and parts together")
        messages.append(_message(message, f"{path}[{place}]"))
    return messages


def _message(value: Any, path: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise wrong_type(path, "an object", value)
    message: dict[str, Any] = {"role": _role(value.get("role"), path), "content": ""}
    for key, item in value.items():
        if key == "role":
            continue
        inner = f"{path}.{key[:100]}"
        if key == "content":
            message["content"] = _content(item, message["role"], inner)
        elif item is None and (key in _TEXT_FIELDS or key in _REFUSED_FIELDS):
            continue
        elif key in _TEXT_FIELDS:
            if type(item) is not str:
                raise wrong_type(inner, "a string", item)
            message[_TEXT_FIELDS[key]] = item
        elif key in _REFUSED_FIELDS:
            if item != []:
                raise invalid(inner, f"'{inner}' is not supported", "unsupported_parameter")
        elif key not in _IGNORED_FIELDS:
            raise invalid(inner, f"unknown field '{inner}'", "unknown_parameter")
    if "content" not in value and message["role"] != "assistant":
        raise invalid(f"{path}.content", f"'{path}.content' is required", "missing_required_parameter")
    return message


def _role(value: Any, path: str) -> str:
    path = f"{path}.role"
    if value is None:
        raise invalid(path, f"'{path}' is required", "missing_required_parameter")
    if type(value) is not str:
        raise wrong_type(path, "a string", value)
    role = ROLES.get(value)
    if role is None:
        code = "unsupported_value" if value in ("tool", "function") else "invalid_value"
        raise invalid(path, f"'{path}' must be one of {', '.join(ROLES)}; got {value[:40]!r}", code)
    return role


def _content(value: Any, role: str, path: str) -> str:
    if type(value) is str:
        return value
    if value is None and role == "assistant":
        return ""
    if type(value) is not list:
        raise wrong_type(path, "a string or an array of text parts", value)
    # One string, because that is what templates of text models take; the line break between parts is vLLM's way.
    return "\n".join([_part(part, f"{path}[{place}]") for place, part in enumerate(value)])


def _part(value: Any, path: str) -> str:
    if type(value) is not dict:
        raise wrong_type(path, "an object", value)
    kind = value.get("type")
    if kind != "text":
        inner = f"{path}.type"
        shown = repr(kind[:40]) if type(kind) is str else "none"
        message = f"'{inner}' must be 'text', other parts are not supported; got {shown}"
        raise invalid(inner, message, "unsupported_value")
    text = value.get("text")
    if type(text) is not str:
        raise wrong_type(f"{path}.text", "a string", text)
    return text


_TABLE: dict[str, tuple[str, Check]] = {
    **SHARED,
    "messages": ("messages", _messages),
    "tools": ("_tools", tools),
    "tool_choice": ("_tool_choice", lambda value, path: value),
    "logprobs": ("_logprobs", boolean),
    "top_logprobs": ("_top_logprobs", integer(0, TOP_LOGPROBS_MAX)),
}
