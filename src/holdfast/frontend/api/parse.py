"""Parses body bytes to a normalised request, for /v1/chat/completions and /v1/completions.

Always true:
- Any bytes give a checked request or an ApiError of 400.
- A body is decoded once, and each of its fields is looked up once: the cost depends only on what was sent.
- A parsed message has a role that chat templates know, and its content as one string. The number of messages bounds the
  cost of rendering.
- There is at least one prompt, a prompt of ids has at least one id, and prompts times `n` is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from holdfast.frontend.api.errors import ApiError, invalid
from holdfast.frontend.api.fields import (
    HARMLESS,
    INT32_MAX,
    REFUSED,
    SHARED,
    TOP_LOGPROBS_MAX,
    Check,
    boolean,
    integer,
    require_type,
    token_id,
    tools,
    wrong_type,
)
from holdfast.frontend.api.request import CHOICES_MAX, ParsedRequest

# How large a body that failed to parse may be to be parsed a second time for a better message, where a client waits
# for the thread (about 1 ms).
EXPLAINED_BYTES_MAX = 64 * 1024

_decode = msgspec.json.Decoder().decode

Fields = dict[str, Any]


class Unexplained(ApiError):
    """Raised for a wrong body if finding the field to blame would take too long here."""


def read_fields(body: bytes, table: Mapping[str, tuple[str, Check]], *, thorough: bool) -> Fields:
    """Return checked values by their name in ParsedRequest (or with a leading underscore). Raise ApiError that names
    the wrong field, or `Unexplained` if only a `thorough` reader may take the time to find it."""
    try:
        decoded = _decode(body)
    except UnicodeDecodeError:
        raise _bad_utf8(body) from None
    except RecursionError:
        raise _bad_json("it is nested too deeply") from None
    except msgspec.DecodeError as error:
        if len(body) > EXPLAINED_BYTES_MAX and not thorough:
            raise Unexplained(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
        raise _explained(body, table) from None
    return _check_fields(decoded, table)


def _check_fields(decoded: Any, table: Mapping[str, tuple[str, Check]]) -> Fields:
    require_type(decoded, dict, "body", "a JSON object")
    fields: Fields = {}
    for key, value in decoded.items():
        if value is None:
            if key not in table and key not in REFUSED and key not in HARMLESS:
                raise _unknown(key)
            continue
        known = table.get(key)
        if known is not None:
            name, check = known
            fields[name] = check(value, key)
        elif key not in HARMLESS:
            _refuse(key, value)
    return fields


def _refuse(key: str, value: Any) -> None:
    as_anyway = REFUSED.get(key)
    if as_anyway is None:
        raise _unknown(key)
    if value not in as_anyway:
        message = f"'{key}' is not supported" + (f" other than {json.dumps(as_anyway[0])}" if as_anyway else "")
        raise invalid(key, message, "unsupported_parameter")


def _unknown(key: str) -> ApiError:
    key = key[:100]  # long enough for the client to recognise its field
    return invalid(key, f"unknown field '{key}'", "unknown_parameter")


def require(fields: Fields, name: str) -> None:
    if name not in fields:
        raise invalid(name, f"'{name}' is required", "missing_required_parameter")


def check_combined_fields(fields: Fields) -> Fields:
    """Check the shared fields that depend on each other; the remaining ones fit ParsedRequest."""
    require(fields, "model")
    _merge_max_tokens(fields)
    if "_usage" in fields:
        if not fields.get("stream", False):
            raise invalid("stream_options", "'stream_options' is only allowed with 'stream': true")
        fields["usage"] = fields.pop("_usage")
    if fields.pop("_best_of", fields.get("n", 1)) != fields.get("n", 1):
        raise invalid("best_of", "'best_of' is not supported other than equal to 'n'", "unsupported_parameter")
    return fields


def _merge_max_tokens(fields: Fields) -> None:
    completion = fields.pop("_max_completion_tokens", None)
    if completion is not None:
        if fields.get("max_tokens", completion) != completion:
            raise invalid("max_tokens", "'max_tokens' and 'max_completion_tokens' differ; give one of them")
        fields["max_tokens"] = completion
        fields["max_tokens_field"] = "max_completion_tokens"
    least, most = fields.get("min_tokens"), fields.get("max_tokens")
    if least is not None and most is not None and least > most:
        field = fields.get("max_tokens_field", "max_tokens")
        raise invalid("min_tokens", f"'min_tokens' ({least}) is more than '{field}' ({most})")


def _bad_json(why: str) -> ApiError:
    return invalid(None, f"the body is not valid JSON: {why}", "invalid_json")


def _bad_utf8(body: bytes) -> ApiError:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return _bad_json(f"byte {error.start} is not UTF-8")
    return _bad_json("it is not UTF-8")


def _explained(body: bytes, table: Mapping[str, tuple[str, Check]]) -> ApiError:
    """Return an error that names the field if a laxer parser can find it: NaN, Infinity, numbers beyond all ranges."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return _bad_utf8(body)
    try:
        _check_fields(json.loads(text), table)
    except ApiError as error:
        return error
    except json.JSONDecodeError as error:
        return _bad_json(f"{error.msg} at byte {len(text[: error.pos].encode())}")
    except RecursionError:
        return _bad_json("it is nested too deeply")
    except ValueError:
        return _bad_json("it holds an integer of thousands of digits")
    return _bad_json("it holds half of a surrogate pair, or NaN, or Infinity")


# -- /v1/chat/completions

# Messages and their parts, together. A template costs 2-4 us for each on the event loop: 8 ms at worst, where no
# other stream may be delayed by more than 20 ms.
MESSAGES_AND_PARTS_MAX = 2048

# A developer message is what newer clients call a system message; models' templates know only the latter.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

# Passed to the template, by their name there. The field for reasoning was renamed, and templates know the old name.
_TEXT_FIELDS = {"name": "name", "reasoning_content": "reasoning_content", "reasoning": "reasoning_content"}
# Fields of answers that clients send back, and marks for caches and traces.
_IGNORED_FIELDS = frozenset({"annotations", "cache_control", "id", "metadata", "reasoning_details", "refusal"})
_REFUSED_FIELDS = frozenset({"tool_calls", "tool_call_id", "function_call", "audio"})


def parse_chat(body: bytes, *, thorough: bool = False) -> ParsedRequest:
    """Return the chat request; raise ApiError(400) if it is wrong."""
    fields = read_fields(body, _CHAT_FIELDS, thorough=thorough)
    require(fields, "messages")
    top = fields.pop("_top_logprobs", None)
    if fields.pop("_logprobs", False):
        fields["top_logprobs"] = top or 0
    elif top is not None:
        raise invalid("top_logprobs", "'top_logprobs' is only allowed with 'logprobs': true")
    _settle_tools(fields)
    return ParsedRequest(kind="chat", **check_combined_fields(fields))


def _settle_tools(fields: dict[str, Any]) -> None:
    """Raise ApiError for tools, unless `tool_choice` forbids calls: then they change nothing, and clients send them
    when they end a tool's turn."""
    offered, choice = fields.pop("_tools", False), fields.pop("_tool_choice", None)
    if offered and choice != "none":
        message = "'tools' are not supported unless 'tool_choice' is \"none\""
        raise invalid("tools", message, "unsupported_parameter")
    if choice not in (None, "none", "auto"):  # without tools, auto is none
        raise invalid("tool_choice", "'tool_choice' is not supported other than \"none\"", "unsupported_parameter")


def _messages(value: Any, path: str) -> list[dict[str, Any]]:
    require_type(value, list, path, "an array of messages")
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
    require_type(value, dict, path, "an object")
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
            message[_TEXT_FIELDS[key]] = require_type(item, str, inner, "a string")
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
    role = ROLES.get(require_type(value, str, path, "a string"))
    if role is None:
        code = "unsupported_value" if value in ("tool", "function") else "invalid_value"
        raise invalid(path, f"'{path}' must be one of {', '.join(ROLES)}; got {value[:40]!r}", code)
    return role


def _content(value: Any, role: str, path: str) -> str:
    if type(value) is str:
        return value
    if value is None and role == "assistant":
        return ""
    require_type(value, list, path, "a string or an array of text parts")
    # One string, because that is what templates of text models take; the line break between parts is vLLM's way.
    return "\n".join([_part(part, f"{path}[{place}]") for place, part in enumerate(value)])


def _part(value: Any, path: str) -> str:
    require_type(value, dict, path, "an object")
    kind = value.get("type")
    if kind != "text":
        inner = f"{path}.type"
        shown = repr(kind[:40]) if type(kind) is str else "none"
        message = f"'{inner}' must be 'text', other parts are not supported; got {shown}"
        raise invalid(inner, message, "unsupported_value")
    return require_type(value.get("text"), str, f"{path}.text", "a string")


_CHAT_FIELDS: dict[str, tuple[str, Check]] = {
    **SHARED,
    "messages": ("messages", _messages),
    "tools": ("_tools", tools),
    "tool_choice": ("_tool_choice", lambda value, path: value),
    "logprobs": ("_logprobs", boolean),
    "top_logprobs": ("_top_logprobs", integer(0, TOP_LOGPROBS_MAX)),
}


# -- /v1/completions

_Ids = list[Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]]


def parse_completion(body: bytes, *, thorough: bool = False) -> ParsedRequest:
    """Return the completions request; raise ApiError(400) for one that is wrong."""
    fields = read_fields(body, _COMPLETION_FIELDS, thorough=thorough)
    require(fields, "prompt")
    prompts = fields.pop("prompt")
    choices = len(prompts) * fields.get("n", 1)
    if choices > CHOICES_MAX:
        raise invalid("n", f"'prompt' and 'n' ask for {choices} choices together; at most {CHOICES_MAX} are allowed")
    return ParsedRequest(kind="completion", prompts=prompts, **check_combined_fields(fields))


def _prompts(value: Any, path: str) -> list[str | list[int]]:
    if type(value) is str:
        return [value]
    require_type(value, list, path, "a string, an array of strings, an array of token ids or an array of such arrays")
    if not value:
        raise invalid(path, f"'{path}' must not be an empty array")
    first = type(value[0])
    if first is int:
        return [_ids(value, path)]
    if first is not str and first is not list:
        raise wrong_type(f"{path}[0]", "a string, a token id or an array of token ids", value[0])
    if len(value) > CHOICES_MAX:
        raise invalid(path, f"'{path}' must have at most {CHOICES_MAX} prompts; got {len(value)}")
    return [_prompt(item, first, f"{path}[{place}]") for place, item in enumerate(value)]


def _prompt(value: Any, kind: type, path: str) -> str | list[int]:
    if kind is str and isinstance(value, str):
        return value
    if kind is list and isinstance(value, list):
        if not value:
            raise invalid(path, f"'{path}' must not be an empty array")
        return _ids(value, path)
    raise wrong_type(path, f"{'a string' if kind is str else 'an array of token ids'} like the first prompt", value)


def _ids(value: list[Any], path: str) -> list[int]:
    try:
        return msgspec.convert(value, _Ids)  # in C: a prompt may be 100,000 ids
    except msgspec.ValidationError:
        for place, item in enumerate(value):
            token_id(item, f"{path}[{place}]")  # raises for the wrong one
        raise AssertionError("one of the ids was refused") from None


_COMPLETION_FIELDS: dict[str, tuple[str, Check]] = {
    **SHARED,
    "prompt": ("prompt", _prompts),
    "logprobs": ("top_logprobs", integer(0, TOP_LOGPROBS_MAX)),
}
