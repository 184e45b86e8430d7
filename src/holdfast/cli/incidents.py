"""`holdfast incidents`: what died in one state directory, why, and what it cost; kept across restarts."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from holdfast.cli.failovers import cost, headline, steps, when
from holdfast.cli.ps import incidents_by_now, look_at_all
from holdfast.cli.screen import Screen, tilde


def run_incidents(state_dir: Path, as_json: bool, last: int) -> int:
    """The latest `last` of them, oldest first; 0: all that are kept."""
    statuses = asyncio.run(look_at_all(state_dir))
    incidents = incidents_by_now(state_dir, statuses)[-last:]
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(incidents), indent=2).decode() + "\n")
        return 0
    screen = Screen()
    trouble = [status.note for status in statuses if status.role == "supervisor"]
    if not incidents:
        why = "" if trouble else ": nothing has died unasked"
        screen.line(f"no incidents in {tilde(state_dir)}{why}")
    for incident in incidents:
        screen.line(f"{when(incident.unix_s)}  {headline(incident)}")
        if facts := cost(incident):
            screen.steps(facts, "  ", "; ")
        if incident.failover:
            screen.steps(steps(incident.failover, incident.streams), "    ")
    for note in trouble:
        screen.line(f"supervisor: {note}", style="yellow")
    return 0
