"""`python -m bench.vault JSON`: one process of the load, in the role the settings name, until it is killed."""

from __future__ import annotations

import asyncio
import json
import sys

from bench.vault.load import Actor, Checker, Reader, Writer
from bench.vault.owner import Owner

ROLES: dict[str, type[Actor]] = {"reader": Reader, "writer": Writer, "checker": Checker, "owner": Owner}


async def play() -> None:
    settings = json.loads(sys.argv[1])
    await ROLES[settings["role"]](settings).for_ever()


if __name__ == "__main__":
    asyncio.run(play())
