"""Options that would do nothing for what was asked for. Pure.

Always true: who gave such an option is told so by its name: a wish that is quietly dropped looks granted.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.errors import Refused

# By their names in Python; flags come in with what was given.
ONLY = {
    "sim": (
        *("vault_gib", "sim_ttft_ms", "sim_tpot_ms", "sim_ranks", "sim_poison_token", "allow_chaos"),
        *("sim_jitter", "sim_concurrency", "sim_queue", "sim_block_size", "sim_kv_blocks", "sim_context_tokens_max"),
    ),
    "torch": ("exact", "ranks", "kv_gib", "context", "streams_max", "threads"),
}
INSTEAD = {
    "ranks": "the simulator's is --sim-ranks",
    "sim_ranks": "a real model's is --ranks",
    "kv_gib": "the simulator's memory is --vault-gib",
    "vault_gib": "a real model's pool is --kv-gib",
    "allow_chaos": "break a real engine with kill",
}
WITH_STANDBYS = ("standby", "kv", "wake_s", "vault_gib")


def refuse_idle(engine: str, standbys: int, given: Mapping[str, str]) -> None:
    """`given`: the options that somebody gave, by name, each with its flag. Refused names one that does nothing."""
    for owner, names in ONLY.items():
        for name in names:
            if name in given and owner != engine and engine in ONLY:
                instead = f"; {INSTEAD[name]}" if name in INSTEAD else ""
                raise Refused(f"{given[name]} is for --engine {owner} and does nothing for {engine}{instead}")
    for name in WITH_STANDBYS:
        if name in given and not standbys:
            raise Refused(f"{given[name]} does nothing without standbys; leave it out, or use --standbys 1 or more")
