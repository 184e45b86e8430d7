"""Builds sampling parameters from the request's own values, then the model card's, then OpenAI's defaults.

Always true: prompt and answer fit the model's context; a refusal names the field that would have to change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.core.requests import Sampling
from holdfast.frontend.api.errors import ApiError, invalid
from holdfast.frontend.api.fields import SHARED
from holdfast.frontend.api.request import ParsedRequest

# The fields for which a model's card may have its own default (a generation_config.json has more; the rest is ignored).
CARD_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"

# The length of a completion without `max_tokens`, as in OpenAI and vLLM; clients rely on this limit.
COMPLETION_TOKENS = 16


def context_exceeded(param: str, context_tokens_max: int, rest: str) -> ApiError:
    """Return the error. It begins with OpenAI's words, by which clients recognise that the prompt is too long."""
    message = f"This model's maximum context length is {context_tokens_max} tokens. However, {rest}"
    return invalid(param, message, CONTEXT_LENGTH_EXCEEDED)


def check_defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a card's generation defaults, checked for `build_sampling`; raise ValueError if one is wrong."""
    defaults: dict[str, Any] = {}
    for name in CARD_DEFAULTS:
        value = raw.get(name)
        if value is None:
            continue
        try:
            defaults[name] = SHARED[name][1](value, name)
        except ApiError as error:
            raise ValueError(f"generation defaults: {error.message}") from error
    return defaults


def check_token_ids(parsed: ParsedRequest, vocab_size: int) -> None:
    """Raise ApiError for ids that the model does not have: an engine would read outside its tables."""
    for place, prompt in enumerate(parsed.prompts):
        if not isinstance(prompt, str):
            _check_ids(prompt, vocab_size, f"prompt[{place}]" if len(parsed.prompts) > 1 else "prompt")
    _check_ids(parsed.logit_bias or (), vocab_size, "logit_bias")
    _check_ids(parsed.stop_token_ids, vocab_size, "stop_token_ids")


def _check_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    largest = max(ids, default=0)
    if largest >= vocab_size:
        raise invalid(param, f"'{param}' has token id {largest}; this model's ids end at {vocab_size - 1}")


def build_sampling(
    parsed: ParsedRequest,
    generation_defaults: Mapping[str, Any],
    seed: int,
    prompt_tokens: int,
    context_tokens_max: int,
) -> Sampling:
    """Return the sampling parameters of one choice. `generation_defaults` comes from `check_defaults`."""

    def pick(name: str, otherwise: float) -> Any:
        value = getattr(parsed, name)
        return value if value is not None else generation_defaults.get(name, otherwise)

    max_tokens = _max_tokens(parsed, generation_defaults.get("max_tokens"), prompt_tokens, context_tokens_max)
    return Sampling(
        max_tokens=max_tokens,
        seed=seed,
        temperature=pick("temperature", 1.0),
        top_p=pick("top_p", 1.0),
        top_k=pick("top_k", 0),
        min_p=pick("min_p", 0.0),
        presence_penalty=parsed.presence_penalty or 0.0,
        frequency_penalty=parsed.frequency_penalty or 0.0,
        repetition_penalty=pick("repetition_penalty", 1.0),
        logit_bias=parsed.logit_bias,
        top_logprobs=parsed.top_logprobs,
        min_tokens=_min_tokens(parsed, max_tokens, context_tokens_max - prompt_tokens),
        ignore_eos=parsed.ignore_eos,
    )


def _max_tokens(parsed: ParsedRequest, default: int | None, prompt_tokens: int, context_tokens_max: int) -> int:
    source = parsed.source
    if prompt_tokens == 0:
        raise invalid(source, f"'{source}' has no tokens; there is nothing to go on from")
    rest = context_tokens_max - prompt_tokens
    if rest < 1:
        why = f"'{source}' takes {prompt_tokens} tokens and leaves no room for an answer; shorten it."
        raise context_exceeded(source, context_tokens_max, why)
    if parsed.max_tokens is None:
        silent = COMPLETION_TOKENS if parsed.kind == "completion" else rest
        return min(silent, rest, default if default is not None else rest)
    if parsed.max_tokens > rest:
        field = parsed.max_tokens_field
        why = f"you requested {prompt_tokens + parsed.max_tokens} tokens ({prompt_tokens} in '{source}', "
        why += f"{parsed.max_tokens} in '{field}'); shorten either."
        raise context_exceeded(field, context_tokens_max, why)
    return parsed.max_tokens


def _min_tokens(parsed: ParsedRequest, max_tokens: int, rest: int) -> int:
    """Return the minimum number of tokens. `rest`: the context that the prompt leaves. A given `max_tokens` below it
    was refused with the fields."""
    least = parsed.min_tokens or 0
    if least > rest:
        message = f"'min_tokens' ({least}) is more than the {rest} tokens that '{parsed.source}' leaves"
        raise invalid("min_tokens", message)
    if least > max_tokens:
        why = f"is more than the {max_tokens} tokens an answer has where 'max_tokens' is not given; give it"
        raise invalid("min_tokens", f"'min_tokens' ({least}) {why}")
    return least
