"""Every field a request may have, in three tables: those we act on, those that change nothing, those we refuse.

Always true: a field in no table is refused by name; a field we do not support is refused only when its value would
have changed the answer; null always means "not given".
"""

from __future__ import annotations

from typing import Any

from holdfast.core.requests import SEED_MAX
from holdfast.frontend.api.checks import Check, boolean, integer, list_of, number, text, wrong_type
from holdfast.frontend.api.errors import invalid
from holdfast.frontend.api.request import CHOICES_MAX, Usage

STOPS_MAX = 16  # OpenAI takes 4, other servers any number; how many there are hardly changes what a token costs
STOP_CHARS_MAX = 512  # the most a stream may be held back for
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
    """Negative seeds are seeds too: the lower 63 bits stand for them."""
    return int(_seed(value, path)) & SEED_MAX


def top_k(value: Any, path: str) -> int:
    """-1 and 0 both mean off."""
    return max(0, int(_top_k(value, path)))


def stop(value: Any, path: str) -> tuple[str, ...]:
    if type(value) is str:
        return (_stop(value, path),)
    if type(value) is not list:
        raise wrong_type(path, "a string or an array of strings", value)
    stops: tuple[str, ...] = _stop_list(value, path)
    return stops


def logit_bias(value: Any, path: str) -> dict[int, float] | None:
    if type(value) is not dict:
        raise wrong_type(path, "an object of token ids and numbers", value)
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
    """When usage is to be sent; padding against traffic analysis is the other option, and ours is never padded."""
    if type(value) is not dict:
        raise wrong_type(path, "an object", value)
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
    """Whether there are any. They are looked at no further: only requests that may not call them are taken."""
    if type(value) is not list:
        raise wrong_type(path, "an array of tools", value)
    return bool(value)


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

# Accepted and not looked at: they never change an answer's tokens.
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

# Refused unless null or one of these values, which ask for what happens anyway.
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
