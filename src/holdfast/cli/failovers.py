"""A group's last failover in lines for people: who leads, and what happened when."""

from __future__ import annotations

import time
from typing import Any

from holdfast.supervise.standing import timeline


def headline(failover: dict[str, Any]) -> str:
    """When it was, and what became of the dead engine's KV."""
    return f"last failover {_when(failover)}{_why(failover)}"


def steps(failover: dict[str, Any]) -> list[str]:
    """What happened when, in order."""
    return [f"{words} {_span(at_ms)}" for words, at_ms in timeline(failover)]


def _when(failover: dict[str, Any]) -> str:
    at_s = failover.get("unix_s")
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s)) if isinstance(at_s, int | float) else ""


def _why(failover: dict[str, Any]) -> str:
    said = [str(failover["why"])] if failover.get("why") else []
    if isinstance(failover.get("blocks"), int):
        blocks = failover["blocks"]
        said.append(f"{blocks} {'block' if blocks == 1 else 'blocks'} of KV kept")
    if failover.get("why_empty"):
        said.append(str(failover["why_empty"]))
    return f" ({'; '.join(said)})" if said else ""


def _span(at_ms: float) -> str:
    if at_ms == 0.0:
        return "0"
    return f"{at_ms:.1f} ms" if at_ms < 1000.0 else f"{at_ms / 1000.0:.2f} s"
