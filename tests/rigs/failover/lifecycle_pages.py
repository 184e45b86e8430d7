"""The lifecycle's tables as docs/failover.md shows them, written from the code's own: `python lifecycle_pages.py`."""

from __future__ import annotations

from holdfast.failover.lifecycle import PROBES, TABLE, Cause, State


def moves() -> list[tuple[State, Cause, State]]:
    """Return every real change of state."""
    return [
        (before, cause, after) for before, row in TABLE.items() for cause, after in row.items() if before is not after
    ]


def diagram() -> str:
    """For readers with mermaid; "ended" leads from everywhere to Dead, and is left out to keep it readable."""
    arrows = [f"    {before} --> {after}: {cause}" for before, cause, after in moves() if cause is not Cause.ENDED]
    return "\n".join(["```mermaid", "stateDiagram-v2", "    [*] --> init", *arrows, "```"])


def state_table() -> str:
    """Return one row per state, one column per cause."""
    causes = [cause for cause in Cause if cause is not Cause.NOTED]
    lines = [f"| in \\ on | {' | '.join(causes)} |", "|---" * (len(causes) + 1) + "|"]
    for before, row in TABLE.items():
        cells = [row[cause].capitalize() if cause in row else "" for cause in causes]
        lines.append(f"| {before.capitalize()} | {' | '.join(cells)} |")
    return "\n".join(lines)


def probe_table() -> str:
    lines = ["| state | /live | /health (ready) | routable |", "|---|---|---|---|"]
    for state, probes in PROBES.items():
        lines.append(f"| {state.capitalize()} | {probes.live} | {probes.ready} | {probes.routable} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print("\n\n".join((diagram(), state_table(), probe_table())))
