"""Parses an operator's canary prompts for a model: each has a prompt and the answer of a healthy engine. No I/O.

They come as JSON: in a file or as text (`--canary-prompts`), or from a manifest's `canaryPrompts`. A worker puts them
into its card as tokens, and control sends them (docs/health.md).

Always true: prompts that `parse` returns are within these bounds; the error for an invalid prompt has its position, its
value and the remedy.
"""

from __future__ import annotations

import math

import msgspec

from holdfast.core.errors import Refused

# A check must be short: it takes a place in the batch, and must end within `canary.TRY_S`.
PROMPTS_MAX = 16
PROMPT_CHARS_MAX = 4000
PROMPT_TOKENS_MAX = 1024
EXPECTED_MAX = 32
TOKEN_MAX = 2**31 - 1


class CanaryPrompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A canary prompt: text or token ids, the tokens expected at temperature 0, and the range of their
    log-probabilities."""

    prompt: str = ""
    prompt_tokens: tuple[int, ...] = ()
    expected_tokens: tuple[int, ...] = ()
    logprob_range: tuple[float, ...] = ()  # lowest and highest, in nats; empty: any

    def problem(self) -> tuple[str, str] | None:
        """Return the invalid field and what is wrong with it; None if all are valid."""
        if bool(self.prompt) is bool(self.prompt_tokens):
            which = "both are given" if self.prompt else "neither is given"
            return "prompt", f"give prompt (text) or prompt_tokens (ids), and only one of them; {which}"
        if len(self.prompt) > PROMPT_CHARS_MAX:
            return "prompt", f"must have {PROMPT_CHARS_MAX} characters or fewer, got {len(self.prompt)}"
        for field, tokens, most in (
            ("prompt_tokens", self.prompt_tokens, PROMPT_TOKENS_MAX),
            ("expected_tokens", self.expected_tokens, EXPECTED_MAX),
        ):
            if len(tokens) > most or (field == "expected_tokens" and not tokens):
                return field, f"must be 1 to {most} token ids, got {len(tokens)}"
            if wrong := [token for token in tokens if not 0 <= token <= TOKEN_MAX]:
                return field, f"a token id is 0 or more, got {wrong[0]}"
        return self._range_problem()

    def _range_problem(self) -> tuple[str, str] | None:
        if not self.logprob_range:
            return None
        said = ", ".join(f"{value:g}" for value in self.logprob_range)
        if len(self.logprob_range) != 2 or not all(map(math.isfinite, self.logprob_range)):
            return "logprob_range", f"must be two numbers, the lowest and the highest, got [{said}]"
        low, high = self.logprob_range
        if not low <= high <= 0.0:
            return "logprob_range", f"must be rising and 0 or less, as logarithms of probabilities are, got [{said}]"
        return None


def parse(text: str | bytes, where: str) -> tuple[CanaryPrompt, ...]:
    """Return the prompts in a JSON text; raise Refused if they are invalid. `where`: the option or file, for the error
    text."""
    try:
        found = msgspec.json.decode(text, type=tuple[CanaryPrompt, ...])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        example = '[{"prompt": "2 + 2 = ", "expected_tokens": [29946], "logprob_range": [-2, 0]}]'
        raise Refused(f"{where} must be a JSON list like {example}: {error}") from error
    if len(found) > PROMPTS_MAX:
        raise Refused(f"{where} must have {PROMPTS_MAX} questions or fewer, got {len(found)}")
    for index, one in enumerate(found):
        if (wrong := one.problem()) is not None:
            raise Refused(f"{where}[{index}].{wrong[0]}: {wrong[1]}")
    return found


def written(prompts: tuple[CanaryPrompt, ...]) -> str:
    """Return the prompts as a JSON text; empty for none."""
    return msgspec.json.encode(prompts).decode() if prompts else ""


def is_text(given: str) -> bool:
    """Return True if an option's value is JSON, not a file name."""
    return given.lstrip().startswith("[")
