"""What the engine's benches on a GPU count and how they judge it: plain data in, figures out.

Pure, and of the standard library alone, because vLLM's half (`engine_vllm_speed`) runs where our packages may not be.
Always true: a figure that was not measured is None or missing, never 0; both engines' speeds come from the same
prompts and by the same rule (`decode_rate`).
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.kv.pool import within_a_block
from holdfast.testing.answers import Answer

Row = dict[str, Any]

GAP_MS_MAX = 150.0  # what the issue demands of the worst gap
GAP_MS_AIM = 50.0
BLOCK_TOKENS = 16
RATIO_AIM = 0.7  # of stock vLLM's decode throughput
SAME_AIM = 0.98  # of it, when the engine is vLLM itself

# `random:8b` in Hugging Face's words, for vLLM. Theta is there twice: versions of transformers look for it elsewhere.
LLAMA_8B: Row = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}

FIRST_ID, IDS = 1000, 4000  # ids that every model here has, plain words in those that have words


def prompt_ids(number: int, length: int, run: int = 0) -> list[int]:
    """Return one prompt. The first two ids tell run and number: no two of them share a block, whatever follows."""
    assert 0 <= number < IDS, f"streams are numbered below {IDS}"
    assert 0 <= run < IDS, f"runs are numbered below {IDS}"
    told = [FIRST_ID + run, FIRST_ID + number]
    return [*told, *(FIRST_ID + (number * 613 + place * (place + 97)) % IDS for place in range(length))][:length]


# -- speed


@dataclass(frozen=True, slots=True)
class Case:
    """How many streams decode at once, and how long their prompts are."""

    batch: int
    prompt: int

    @property
    def name(self) -> str:
        return f"batch-{self.batch}-prompt-{self.prompt}"


CASES = (Case(1, 128), Case(64, 128), Case(1, 2000), Case(64, 2000))
SHORT, LONG = 32, 288  # tokens of the two runs of a case; their difference is decode alone
CONTEXT = 4096  # that vLLM is told
WARM_TOKENS = 16  # kernels are compiled and graphs captured by the first steps of their size


def decode_rate(batch: int, short_s: float, long_s: float) -> Row:
    """Decode alone, from a short run and a long one of the same prompts' length: what both have in common, prompts and
    the streams' uneven start and end, goes out with the difference."""
    more, longer_s = LONG - SHORT, long_s - short_s
    if longer_s <= 0:
        return {"decode_tps": None, "step_ms": None}
    return {"decode_tps": round(more * batch / longer_s, 1), "step_ms": round(longer_s / more * 1000, 3)}


def speed_ratio(ours: Mapping[str, Row], theirs: Mapping[str, Row], aim: float = RATIO_AIM) -> Row:
    """Our decode throughput by vLLM's, by case, where both were measured."""
    ratios = {
        name: round(ours[name]["decode_tps"] / theirs[name]["decode_tps"], 3)
        for name in ours
        if name in theirs and ours[name].get("decode_tps") and theirs[name].get("decode_tps")
    }
    if not ratios:
        return {}
    worst, bound = min(ratios.values()), f"the ratio is reported; aim {aim}"
    return {"ratio": ratios, "ratio_min": worst, "bound": bound, "met": worst >= aim}


# -- the chain


@dataclass(frozen=True, slots=True)
class Kill:
    """Records one kill of the active engine, as clients, the next engine and the device saw it."""

    gap_ms: float  # the worst between two tokens of any stream around it
    calm_gap_ms: float | None  # the worst since all streams had gone on after the kill before; known at the end
    marks_ms: Mapping[str, float]  # of the takeover, by step, from the kill on
    recomputed_tokens: int
    ready_standbys: int  # at the kill
    blocks: int | None = None  # of KV that were taken over
    why_empty: str = ""
    standby_again_s: float | None = None  # from the kill until as many stood ready as before
    freed_mib: int | None = None  # of the device's memory, by the death
    standby_mib: int | None = None  # that the new standby then took


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two answers share from their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (mine, yours) in pairs if mine != yours), min(len(one), len(other)))


def takeover_marks(failover: Mapping[str, Any], killed_s: float) -> dict[str, float]:
    """Whatever the engine's own timeline has, from the kill on instead of from the dead engine's last token. Both are
    of the machine's monotonic clock."""
    zero_s = failover.get("zero_monotonic_s")
    if not isinstance(zero_s, int | float):
        return {}
    offset_ms = (killed_s - zero_s) * 1000
    marks = {key.removesuffix("_ms"): value for key, value in failover.items() if key.endswith("_ms")}
    marks.pop("died", None)
    told = {name: at_ms - offset_ms for name, at_ms in marks.items() if isinstance(at_ms, int | float)}
    return {name: round(at_ms, 2) for name, at_ms in sorted(told.items(), key=lambda mark: mark[1])}


def medians(kills: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Of every mark, over the kills that have it, in order of time."""
    by_name: dict[str, list[float]] = {}
    for marks in kills:
        for name, at_ms in marks.items():
            by_name.setdefault(name, []).append(at_ms)
    middle = {name: round(statistics.median(values), 2) for name, values in by_name.items()}
    return dict(sorted(middle.items(), key=lambda mark: mark[1]))


def chain_row(kills: Sequence[Kill], answers: Sequence[tuple[Answer, Answer]], asked_kills: int) -> Row:
    """All kills and all whole answers, each behind the unbroken one to the same request, as one row with its bounds."""
    gaps = [kill.gap_ms for kill in kills]
    resumed = [pair for pair in answers if pair[1].resumed]
    unbroken = [pair for pair in answers if not pair[1].resumed]
    longer = [len(got.tokens) - len(right.tokens) for right, got in answers if not got.wrong]
    row: Row = {
        "kills": len(kills),
        "gap_ms": gaps,
        "gap_ms_p50": round(statistics.median(gaps), 2) if gaps else None,
        "gap_ms_max": max(gaps, default=None),
        "calm_gap_ms_max": max((kill.calm_gap_ms for kill in kills if kill.calm_gap_ms is not None), default=None),
        "aim_met": bool(gaps) and max(gaps) <= GAP_MS_AIM,
        "marks_ms_p50": medians(kill.marks_ms for kill in kills),
        "recomputed_tokens_max": max((kill.recomputed_tokens for kill in kills), default=None),
        "answers": len(answers),
        "resumed_answers": len(resumed),
        "streams_lost": len(answers) - len(longer),
        "answers_too_long": sum(more > 0 for more in longer),
        "answers_too_short": sum(more < 0 for more in longer),
        "resumed_identical_share": _share(resumed),
        "unbroken_again_identical_share": _share(unbroken),
        "resumed_same_tokens_p50": _median(common(got.tokens, right.tokens) for right, got in resumed),
        "standby_again_s_p50": _median(kill.standby_again_s for kill in kills),
        "freed_mib_p50": _median(kill.freed_mib for kill in kills),
        "standby_mib_p50": _median(kill.standby_mib for kill in kills),
    }
    wrong = row["streams_lost"] + row["answers_too_long"] + row["answers_too_short"]
    quick = bool(gaps) and max(gaps) <= GAP_MS_MAX and within_a_block(row["recomputed_tokens_max"], BLOCK_TOKENS)
    bound = f"worst gap {GAP_MS_MAX:g} ms, aim {GAP_MS_AIM:g}; up to {BLOCK_TOKENS} tokens recomputed; nothing lost"
    return row | {"bound": bound, "met": quick and not wrong and bool(resumed) and len(kills) >= asked_kills}


def _share(pairs: Sequence[tuple[Answer, Answer]]) -> float | None:
    """Of those with the unbroken one's tokens from end to end."""
    same = sum(not got.wrong and got.tokens == right.tokens for right, got in pairs)
    return round(same / len(pairs), 4) if pairs else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 2) if known else None


# -- what a part has found so far


class Keep:
    """Hears a part's row as it grows, and writes it to DIR/PART.json each time: a lent GPU may be gone any minute."""

    def __init__(self, out: Path, part: str) -> None:
        self._out, self._part = out, part
        self._row: Row = {}

    def __call__(self, row: Row) -> None:
        self._row |= row
        (self._out / f"{self._part}.json").write_text(json.dumps({self._part: self._row}, indent=1) + "\n")

    def log(self, text: str) -> None:
        (self._out / f"{self._part}-logs.txt").write_text(text)


def keep_case(head: Row, case: Case, took_s: Mapping[int, Sequence[float]], keep: Keep) -> None:
    """A case's speed goes into the row: of its runs, by their tokens, the quicker of each count."""
    rate = decode_rate(case.batch, min(took_s[SHORT]), min(took_s[LONG]))
    shown = {str(tokens): [round(one, 3) for one in took_s[tokens]] for tokens in (SHORT, LONG)}
    head["cases"][case.name] = rate | {"took_s": shown}
    print(f"{case.name}: {json.dumps(head['cases'][case.name])}", file=sys.stderr, flush=True)
    keep(head)
