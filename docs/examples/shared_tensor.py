"""Two processes share weights through a vault; the writer is killed, and the reader goes on."""

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

from holdfast.memory import MemoryClient, TensorSpec, VaultProcesses, VaultSettings, open_device, socket_path

DEVICE = "host-0"  # or a GPU's UUID


async def write(path: str) -> None:
    client = MemoryClient(path, open_device(DEVICE), 0)
    await client.connect(60)  # the vault may have to start first
    await client.acquire("rw", 10_000)
    spec = TensorSpec("greeting", shape=(5,), stride=(1,), dtype="uint8", size_bytes=5)
    addresses = await client.allocate([spec], "what the weights are")
    client.device.write(addresses["greeting"], b"hello")
    await client.commit()
    await asyncio.Event().wait()  # until it is killed


async def read(path: str, writer: subprocess.Popen[bytes]) -> None:
    client = MemoryClient(path, open_device(DEVICE), 1)
    await client.connect(60)
    await client.acquire("ro", 60_000, wait_for_writer=True)
    writer.kill()
    print("the writer ended with", writer.wait())
    assert client.mapped is not None
    print("the reader reads", client.device.read(client.mapped.addresses()["greeting"], 5))
    await client.close()


if sys.argv[1:]:
    asyncio.run(write(sys.argv[1]))
else:
    with tempfile.TemporaryDirectory() as folder:
        vault = VaultProcesses(VaultSettings(DEVICE, socket_path(Path(folder), DEVICE)))
        vault.start()
        path = vault.settings.socket_path
        asyncio.run(read(path, subprocess.Popen([sys.executable, __file__, path])))
        vault.stop()
