"""What a vault is made of: no torch, no cuda, and little memory of its own however much it keeps."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.memory.layout import TensorSpec
from tests.rigs.memory.vaults import SOON_MS, Rig, facts

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
            await writer.acquire("rw", SOON_MS)
            await writer.allocate(specs, "many")
            await writer.commit()
            await reader.acquire("ro", SOON_MS)
            assert (await facts(reader))["tensors"] == 10_000
            for kind in ("server", "keeper"):
                assert anonymous_mb(rig.pids(kind)[0]) < ANONYMOUS_MB_MAX, kind


def anonymous_mb(pid: int) -> float:
    found = re.search(r"^Anonymous:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) / 1024


def test_the_face_of_memory_is_whole_and_light() -> None:
    """Each name of `holdfast.memory` is there, and having them all has loaded neither torch nor numpy."""
    code = (
        "import sys, holdfast.memory as memory\n"
        "assert all(getattr(memory, name) for name in memory.__all__)\n"
        "sys.exit(bool({'torch', 'numpy', 'cuda'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.processes
def test_the_example_reads_on_after_its_writer_was_killed() -> None:
    """docs/memory.md shows what it prints, word for word."""
    docs = Path(__file__).parents[2] / "docs"
    example = [sys.executable, str(docs / "examples" / "shared_tensor.py")]
    said = subprocess.run(example, check=True, capture_output=True, text=True, timeout=100).stdout
    assert said == "the writer ended with -9\nthe reader reads b'hello'\n"
    assert said in (docs / "memory.md").read_text()
