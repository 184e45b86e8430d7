"""POST /v1/completions: its prompts, as text or as token ids.

Always true: there is at least one prompt, a prompt of ids has at least one, and prompts times `n` is bounded.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from holdfast.frontend.api.checks import Check, integer, wrong_type
from holdfast.frontend.api.errors import ApiError, invalid
from holdfast.frontend.api.fields import INT32_MAX, SHARED, TOP_LOGPROBS_MAX, token_id
from holdfast.frontend.api.parse import read_fields, require, settle
from holdfast.frontend.api.request import CHOICES_MAX, ParsedRequest

_Ids = list[Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]]


def parse_completion(body: bytes, *, thorough: bool = False) -> ParsedRequest:
    """A completions request, or ApiError(400)."""
    fields = read_fields(body, _TABLE, thorough=thorough)
    require(fields, "prompt")
    prompts = fields.pop("prompt")
    choices = len(prompts) * fields.get("n", 1)
    if choices > CHOICES_MAX:
        raise invalid("n", f"'prompt' and 'n' ask for {choices} choices together; at most {CHOICES_MAX} are allowed")
    return ParsedRequest(kind="completion", prompts=prompts, **settle(fields))


def _prompts(value: Any, path: str) -> list[str | list[int]]:
    if type(value) is str:
        return [value]
    if type(value) is not list:
        raise wrong_type(path, "a string, an array of strings, an array of token ids or an array of such arrays", value)
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
    # Checked in C: a prompt may be 100,000 ids.
    try:
        return msgspec.convert(value, _Ids)
    except msgspec.ValidationError:
        raise _bad_id(value, path) from None


def _bad_id(value: list[Any], path: str) -> ApiError:
    for place, item in enumerate(value):
        try:
            token_id(item, f"{path}[{place}]")
        except ApiError as error:
            return error
    raise AssertionError("one of the ids was refused")


_TABLE: dict[str, tuple[str, Check]] = {
    **SHARED,
    "prompt": ("prompt", _prompts),
    "logprobs": ("top_logprobs", integer(0, TOP_LOGPROBS_MAX)),
}
