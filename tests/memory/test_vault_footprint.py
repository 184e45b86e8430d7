"""What a vault is made of: no torch, no cuda, and little memory of its own however much it keeps."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from vault_rig import Rig, facts

from holdfast.memory.packing import TensorSpec

ANONYMOUS_MB_MAX = 40


@pytest.mark.parametrize("module", ["vault.server", "vault.keeper", "vault.launch", "client.weights", "client.pool"])
def test_import_loads_neither_torch_nor_cuda(module: str) -> None:
    """Neither the packages nor the driver's library, in a fresh interpreter."""
    code = (
        f"import sys, holdfast.memory.{module}\n"
        "heavy = {name for name in sys.modules if name.split('.')[0] in ('torch', 'cuda', 'numpy', 'pynvml')}\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert not heavy and 'libcuda' not in maps, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.processes
async def test_anonymous_memory_stays_small_with_ten_thousand_tensors() -> None:
    """Vault and keeper each, with all of it committed, read by another client, and asked for."""
    specs = [TensorSpec(f"model.layers.{n}.mlp.experts.weight", (16, 16), (16, 1), "bf16", 512) for n in range(10_000)]
    with Rig() as rig:
        async with rig.client(0) as writer, rig.client(1) as reader:
            await writer.acquire("rw", 1000)
            await writer.allocate(specs, "many")
            await writer.commit()
            await reader.acquire("ro", 5000)
            assert (await facts(reader))["tensors"] == 10_000
            for kind in ("server", "keeper"):
                assert anonymous_mb(rig.pids(kind)[0]) < ANONYMOUS_MB_MAX, kind


def anonymous_mb(pid: int) -> float:
    found = re.search(r"^Anonymous:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) / 1024
