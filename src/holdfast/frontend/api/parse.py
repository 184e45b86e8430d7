"""From body bytes to checked fields: what chat and completions have in common.

Always true: any bytes at all give checked fields or an ApiError of 400. A request is decoded once, and each field
it has is looked up once, so the cost follows what was sent and not what could be sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.frontend.api.checks import Check, wrong_type
from holdfast.frontend.api.errors import ApiError, invalid
from holdfast.frontend.api.fields import HARMLESS, REFUSED

# How large a body that failed to parse may be to be parsed a second time for a better message, where somebody waits
# for the thread (about 1 ms).
EXPLAINED_BYTES_MAX = 64 * 1024

_decode = msgspec.json.Decoder().decode

Fields = dict[str, Any]


class Unexplained(ApiError):
    """The body is wrong; which field is to blame would take a longer look."""


def read_fields(body: bytes, table: Mapping[str, tuple[str, Check]], *, thorough: bool) -> Fields:
    """Checked values by their name in ParsedRequest (or with a leading underscore); refusals by field, or `Unexplained`
    where only a `thorough` reader may take the time to find it."""
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
    if type(decoded) is not dict:
        raise wrong_type("body", "a JSON object", decoded)
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
    key = key[:100]  # a client's key, told back to it: long enough to be known again
    return invalid(key, f"unknown field '{key}'", "unknown_parameter")


def require(fields: Fields, name: str) -> None:
    if name not in fields:
        raise invalid(name, f"'{name}' is required", "missing_required_parameter")


def settle(fields: Fields) -> Fields:
    """Judge the shared fields that depend on each other; what is left fits ParsedRequest."""
    require(fields, "model")
    _settle_max_tokens(fields)
    if "_usage" in fields:
        if not fields.get("stream", False):
            raise invalid("stream_options", "'stream_options' is only allowed with 'stream': true")
        fields["usage"] = fields.pop("_usage")
    if fields.pop("_best_of", fields.get("n", 1)) != fields.get("n", 1):
        raise invalid("best_of", "'best_of' is not supported other than equal to 'n'", "unsupported_parameter")
    return fields


def _settle_max_tokens(fields: Fields) -> None:
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
    """Name the field where a laxer reader gets far enough to see it: NaN, Infinity and numbers beyond all ranges."""
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
