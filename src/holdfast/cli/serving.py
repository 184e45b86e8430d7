"""Whether a deployment serves its models, and if not what it waits for, by its frontends' own word.

Always true: that every process is ready is not enough: who has nobody to send a request to does not serve. Asking is
bounded, and a frontend that does not answer does not serve.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.cli.launch import FrontendLaunch, Launch, WorkerLaunch
from holdfast.core.address import parse_address
from holdfast.core.ports import Network
from holdfast.supervise.asking import ask
from holdfast.supervise.records import read_record

ANSWER_S = 1.0  # a live frontend answers in milliseconds


async def waits_for(state_dir: Path, launches: Sequence[Launch], network: Network) -> dict[str, str]:
    """Frontend and what it waits for, for each that does not serve every model; empty: all do."""
    frontends = [launch for launch in launches if isinstance(launch, FrontendLaunch)]
    models = sorted({launch.model for launch in launches if isinstance(launch, WorkerLaunch)})
    facts = await asyncio.gather(*(_facts(state_dir, launch.name, network) for launch in frontends))
    said = {launch.name: lacks(found, models, launch.store) for launch, found in zip(frontends, facts, strict=True)}
    return {name: lack for name, lack in said.items() if lack}


async def _facts(state_dir: Path, name: str, network: Network) -> dict[str, Any] | None:
    record = read_record(state_dir, name)
    return await ask(parse_address(record.status), network, ANSWER_S) if record and record.status else None


def lacks(facts: dict[str, Any] | None, models: Sequence[str], store: str) -> str:
    """What a frontend that answered so waits for; "" if it serves all of `models`. Pure."""
    if facts is None:
        return "waiting for its answer"
    missing = [model for model in models if model not in facts.get("models", ())]
    if not missing and (facts.get("status") == "ready" or not models):
        return ""
    if facts.get("store") == "lost":
        return f"waiting for the store {store}: it does not answer"
    objections = {str(worker["reason"]) for worker in facts.get("workers", ()) if worker.get("reason")}
    whom = f"waiting for a worker of {', '.join(missing)}" if missing else "waiting for a worker"
    why = "; ".join(sorted(objections)) or str(facts.get("reason") or "")
    return f"{whom}: {why}" if why else whom
