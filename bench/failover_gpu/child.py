"""The process of an engine in the failover bench on a GPU: it stands by, wins the lock, wakes, works, and is killed.

`python -m bench.failover_gpu.child JSON`; commands come on stdin, one JSON object per event goes to stdout.
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback

import msgspec

from bench.failover_gpu.engine import DirectEngine, Engine, Settings, say, trace_driver
from bench.failover_gpu.late import LateEngine, play_queue
from bench.failover_gpu.pool import VaultEngine
from holdfast.memory.devices import DeviceError
from holdfast.memory.errors import VaultRefused

KINDS: dict[str, type[Engine]] = {"direct": DirectEngine, "vault": VaultEngine, "late": LateEngine}


async def serve_commands(engine: Engine) -> None:
    """One at a time from stdin, until it ends."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command, _, how = line.strip().partition(" ")
        if command == "arm":
            await engine.wait()
            facts = await engine.wake(fenced=how != "unfenced")
            say("woke", marks=engine.marks, **facts)
            await engine.serve()
            say("serving")
        elif command == "plant":
            say("planted", **await engine.plant())


async def run(settings: Settings) -> None:
    if settings.part == "queue":
        await play_queue(settings)
        return
    engine = KINDS[settings.part](settings)
    trace_driver(engine.driver_calls)
    await engine.start()
    say("ready", pid=os.getpid())
    await serve_commands(engine)


async def live(settings: Settings) -> None:
    """Threads that wait for the lock or keep the GPU busy end with the process only, and the loop would wait for them:
    so it is left from inside, with the reason said."""
    try:
        await run(settings)
    except (DeviceError, VaultRefused, OSError, AssertionError) as error:
        say("error", error=f"{type(error).__name__}: {error}")
        traceback.print_exc()
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        os._exit(0)


if __name__ == "__main__":
    asyncio.run(live(msgspec.json.decode(sys.argv[1], type=Settings)))
