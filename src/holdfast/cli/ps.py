"""`holdfast ps`: what runs in one state directory."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from holdfast.cli.screen import Screen, tilde
from holdfast.supervise.lock import holder
from holdfast.supervise.status import look
from holdfast.wire.net import SocketNetwork


def run_ps(state_dir: Path, as_json: bool) -> int:
    statuses = asyncio.run(look(state_dir, SocketNetwork()))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(statuses), indent=2).decode() + "\n")
        return 0
    screen = Screen()
    if not statuses:
        screen.line(f"nothing runs in {tilde(state_dir)}; start with `holdfast up`")
        return 0
    screen.table(statuses)
    found = holder(state_dir)
    if found is None:
        screen.line("\nno supervisor: nothing is restarted until `holdfast up` adopts these", style="yellow")
    else:
        screen.line(f"\nsupervised by pid {found.pid}{', detached' if found.detached else ''}", style="dim")
    return 0
