"""An engine of the torch glue's tests in a process of its own: one command a line on stdin, one JSON answer a line."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ANSWER_S = 60.0  # `import torch` takes seconds on a busy machine
_FIELDS = re.compile(r"^(Rss|Pss):\s+(\d+) kB$", re.MULTILINE)


class Engine:
    """The test's side of an agent."""

    def __init__(self, path: str, width: int, device: str = "host-0") -> None:
        command = [sys.executable, __file__, path, str(width), device]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, command: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def fate(self) -> int:
        return self.process.wait(ANSWER_S)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=ANSWER_S)


def slab_kib(pid: str = "self") -> dict[str, int]:
    """Resident and proportional size of this process's mappings of slabs."""
    total = {"Rss": 0, "Pss": 0}
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text()):
        if "memfd:holdfast" in block.split("\n")[0]:
            for field, kib in _FIELDS.findall(block):
                total[field] += int(kib)
    return total


async def serve(path: str, width: int, device: str) -> None:
    import torch_story as story

    from holdfast.memory.torch.glue import materialise, publish

    loop = asyncio.get_running_loop()
    client = story.MemoryClient(path, story.open_device(device), 0)
    await client.connect()
    model = story.on_meta(width)

    async def obey(command: str) -> Any:
        nonlocal model
        if command == "publish":
            assert await client.acquire("rw", 10_000) == "rw"
            model = story.loaded(width)
            before = story.answer(model)
            await publish(client, model, "test")
            return before
        if command == "materialise":
            assert await client.acquire("ro", 10_000, wait_for_writer=True) == "ro"
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
