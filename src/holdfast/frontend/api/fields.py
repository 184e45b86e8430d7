"""Every field a request may have, in three tables: supported, without effect, refused.

Always true: a field in no table is refused by name; an unsupported field is refused only if its value would change the
answer; null always means "not given".

A check takes a decoded JSON value and its field's path, and returns the value in the type the rest of the code wants,
or raises a 400 that names the path. Booleans are not numbers; numbers that are too large for a message are not printed
(Python refuses to print integers of more than 4,300 digits).
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, TypeVar

from holdfast.core.requests import SEED_MAX
from holdfast.frontend.api.errors import ApiError, invalid
from holdfast.frontend.api.request import CHOICES_MAX, Usage

Check = Callable[[Any, str], Any]
Kind = TypeVar("Kind")

_SHOWN_INTEGER_MAX = 10**18
_SHOWN_CHARS_MAX = 64

_TYPE_NAMES: dict[type, str] = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


def wrong_type(path: str, wanted: str, value: Any) -> ApiError:
    got = _TYPE_NAMES.get(type(value), type(value).__name__)
    return invalid(path, f"'{path}' must be {wanted}; got {got}", "invalid_type")


def require_type(value: Any, kind: type[Kind], path: str, wanted: str) -> Kind:
    """Return the value, if it is of this very type."""
    if type(value) is not kind:
        raise wrong_type(path, wanted, value)
    return value


def wrong_value(path: str, wanted: str, value: Any) -> ApiError:
    return invalid(path, f"'{path}' must be {wanted}; got {_shown(value)}")


def _shown(value: Any) -> str:
    if type(value) is int and abs(value) > _SHOWN_INTEGER_MAX:
        return "a very large integer"
    if isinstance(value, str) and len(value) > _SHOWN_CHARS_MAX:
        return f"a string of {len(value)} characters"
    return repr(value)


def boolean(value: Any, path: str) -> bool:
    return require_type(value, bool, path, "a boolean")


def integer(low: int, high: int) -> Check:
    """Return an integer of [low, high]. `3.0` is refused: JSON writers that mean an integer write one."""
    wanted = f"an integer from {low} to {high}"

    def check(value: Any, path: str) -> int:
        given = require_type(value, int, path, wanted)
        if not low <= given <= high:
            raise wrong_value(path, wanted, value)
        return given

    return check


def number(low: float, high: float = inf, *, above: bool = False) -> Check:
    """Return a finite number of [low, high], or of (low, high] with `above`."""
    wanted = f"a number {'above' if above else 'from'} {low:g}" + (f" to {high:g}" if high != inf else "")

    def check(value: Any, path: str) -> float:
        if type(value) is not float and type(value) is not int:
            raise wrong_type(path, wanted, value)
        # Integers are compared before they are converted: the conversion raises for one too large for a float. NaN is
        # in no range.
        if not low <= value <= min(high, 1e308) or (above and value == low):
            raise wrong_value(path, wanted, value)
        return float(value)

    return check


def text(chars_max: int) -> Check:
    """Return a string of 1 to chars_max characters."""
    wanted = f"a string of 1 to {chars_max} characters"

    def check(value: Any, path: str) -> str:
        given = require_type(value, str, path, wanted)
        if not 0 < len(given) <= chars_max:
            raise wrong_value(path, wanted, value)
        return given

    return check


def list_of(check: Check, length_max: int) -> Check:
    """Return an array of at most length_max items, each checked, as a tuple."""
    wanted = f"an array of at most {length_max} items"

    def check_all(value: Any, path: str) -> tuple[Any, ...]:
        require_type(value, list, path, wanted)
        if len(value) > length_max:
            raise invalid(path, f"'{path}' must be {wanted}; got {len(value)}")
        return tuple([check(item, f"{path}[{place}]") for place, item in enumerate(value)])

    return check_all


STOPS_MAX = 16  # OpenAI takes 4, other servers any number; the number hardly changes the cost per token
STOP_CHARS_MAX = 512  # the most characters that a stream may hold back
STOP_TOKEN_IDS_MAX = 128
LOGIT_BIAS_MAX = 300  # OpenAI's own bound
TOP_LOGPROBS_MAX = 20  # OpenAI's own bound
MODEL_CHARS_MAX = 256
INT32_MAX = 2**31 - 1

token_id = integer(0, INT32_MAX)
_bias = number(-100, 100)
_seed = integer(-(2**63), SEED_MAX)
_top_k = integer(-1, INT32_MAX)
_stop = text(STOP_CHARS_MAX)
_stop_list = list_of(_stop, STOPS_MAX)


def seed(value: Any, path: str) -> int:
    """Return the seed's lower 63 bits: negative seeds are seeds too."""
    return int(_seed(value, path)) & SEED_MAX


def top_k(value: Any, path: str) -> int:
    """Return 0 for "off", which clients write as -1 or 0."""
    return max(0, int(_top_k(value, path)))


def stop(value: Any, path: str) -> tuple[str, ...]:
    if type(value) is str:
        return (_stop(value, path),)
    require_type(value, list, path, "a string or an array of strings")
    stops: tuple[str, ...] = _stop_list(value, path)
    return stops


def logit_bias(value: Any, path: str) -> dict[int, float] | None:
    require_type(value, dict, path, "an object of token ids and numbers")
    if len(value) > LOGIT_BIAS_MAX:
        raise invalid(path, f"'{path}' must have at most {LOGIT_BIAS_MAX} entries; got {len(value)}")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        # Ten digits hold every 32-bit id; the length is looked at first because int() of a long text is slow.
        if not (0 < len(key) <= 10 and key.isascii() and key.isdigit() and int(key) <= INT32_MAX):
            raise invalid(path, f"'{path}' must have token ids as keys; got {key[:40]!r}")
        bias[int(key)] = _bias(amount, f"{path}.{key}")
    return bias or None


def stream_options(value: Any, path: str) -> Usage:
    """Return when to send usage. The other option, padding against traffic analysis, is accepted and has no effect."""
    require_type(value, dict, path, "an object")
    given: dict[str, bool] = {}
    for key, option in value.items():
        inner = f"{path}.{key[:100]}"
        if key not in ("include_usage", "continuous_usage_stats", "include_obfuscation"):
            raise invalid(inner, f"unknown field '{inner}'", "unknown_parameter")
        if option is not None:
            given[key] = boolean(option, inner)
    if not given.get("include_usage"):
        return Usage.NEVER  # as in vLLM, continuous usage is a kind of included usage
    return Usage.ALWAYS if given.get("continuous_usage_stats") else Usage.LAST


def tools(value: Any, path: str) -> bool:
    """Return True if there are any. They are not examined: only requests that may not call them are accepted."""
    return bool(require_type(value, list, path, "an array of tools"))


# field: (name in ParsedRequest, check). A leading underscore: not stored as it is, judged with others afterwards.
SHARED: dict[str, tuple[str, Check]] = {
    "model": ("model", text(MODEL_CHARS_MAX)),
    "n": ("n", integer(1, CHOICES_MAX)),
    "best_of": ("_best_of", integer(1, CHOICES_MAX)),
    "stream": ("stream", boolean),
    "stream_options": ("_usage", stream_options),
    "return_token_ids": ("return_token_ids", boolean),
    "stop": ("stops", stop),
    "stop_token_ids": ("stop_token_ids", list_of(token_id, STOP_TOKEN_IDS_MAX)),
    "include_stop_str_in_output": ("include_stop", boolean),
    "ignore_eos": ("ignore_eos", boolean),
    "max_tokens": ("max_tokens", integer(1, INT32_MAX)),
    "max_completion_tokens": ("_max_completion_tokens", integer(1, INT32_MAX)),
    "min_tokens": ("min_tokens", integer(0, INT32_MAX)),
    "seed": ("seed", seed),
    "temperature": ("temperature", number(0, 2)),
    "top_p": ("top_p", number(0, 1, above=True)),
    "top_k": ("top_k", top_k),
    "min_p": ("min_p", number(0, 1)),
    "presence_penalty": ("presence_penalty", number(-2, 2)),
    "frequency_penalty": ("frequency_penalty", number(-2, 2)),
    "repetition_penalty": ("repetition_penalty", number(0, above=True)),
    "logit_bias": ("logit_bias", logit_bias),
}

# Accepted and ignored: they never change an answer's tokens.
HARMLESS = frozenset(
    {
        "cache_control",
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "user",
    }
)

# Refused unless null or one of these values, which ask for the normal behaviour.
REFUSED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "cache_salt": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
