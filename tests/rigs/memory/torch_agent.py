"""An engine of the torch glue's tests in a process of its own: one command a line on stdin, one JSON answer a line."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.rigs.children import Child, ChildFailed

ANSWER_S = 110.0  # `import torch` takes seconds, on a busy machine ten times as many
_FIELDS = re.compile(r"^(Rss|Pss):\s+(\d+) kB$", re.MULTILINE)


class Engine(Child):
    """Drives the test's side of an agent."""

    def __init__(self, path: str, width: int, device: str = "host-0") -> None:
        super().__init__(__file__, path, str(width), device)

    def do(self, command: str) -> Any:
        """Its answer; None if it has died."""
        try:
            return self.ask(command, ANSWER_S)
        except ChildFailed:
            if not self.over:
                raise
            return None

    def fate(self) -> int:
        return self.process.wait(ANSWER_S)


def slab_kib(pid: str = "self") -> dict[str, int]:
    """Return resident and proportional size of this process's mappings of slabs."""
    total = {"Rss": 0, "Pss": 0}
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text()):
        if "memfd:holdfast" in block.split("\n")[0]:
            for field, kib in _FIELDS.findall(block):
                total[field] += int(kib)
    return total


async def serve(path: str, width: int, device: str) -> None:
    from holdfast.memory.client.weights import MemoryClient
    from holdfast.memory.devices import open_device
    from holdfast.memory.torch.glue import materialise, publish
    from tests.rigs.memory import torch_modules as story

    loop = asyncio.get_running_loop()
    client = MemoryClient(path, open_device(device), 0)
    await client.connect(60)
    model = story.on_meta(width)

    async def obey(command: str) -> Any:
        nonlocal model
        if command == "publish":
            assert await client.acquire("rw", 60_000) == "rw"
            model = story.loaded(width)
            before = story.answer(model)
            await publish(client, model, "test")
            return before
        if command == "materialise":
            assert await client.acquire("ro", 60_000, wait_for_writer=True) == "ro"
            materialise(client, model, fresh=story.fresh)
        elif command == "sleep":
            await client.unmap()
        elif command == "wake":
            return await client.remap()
        elif command == "answer":
            return story.answer(model)
        elif command == "size":
            return slab_kib()
        elif command == "write":
            with story.torch.no_grad():
                model.mix.weight.zero_()
            client.device.synchronize()  # a GPU tells of its faults when asked
        return "done"

    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await obey(line.strip())), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
