"""Which devices `holdfast up` gives a real engine: what a person named, or what this machine has.

Always true: looking for GPUs loads neither torch nor CUDA into this process (a short-lived one asks the driver), so
that who only starts others has no context; a name that leaves here is the one that the GPU's vault goes by.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.core.errors import UserError
from holdfast.memory.devices import device_name, gpu_uuids
from holdfast.spec.engines import REAL, FailoverSettings
from holdfast.spec.names import is_host

log = logging.getLogger("holdfast.worker")

AUTO = "auto"
CPU = "cpu"
# For the driver to say what there is: a fraction of a second, but seconds where it has to wake up first.
LOOK_S = 30.0
_CUDA_BUILD = re.compile(r"^cuda\b.*=\s*['\"]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Found:
    """The GPUs that an engine could use, in PCI bus order; where there are none, why."""

    gpus: tuple[str, ...] = ()
    why: str = ""
    has_bytes: tuple[int, ...] = ()  # each of them, all there is of it


@dataclass(frozen=True, slots=True)
class Chosen:
    gpus: tuple[str, ...] = ()  # empty: host memory
    note: str = ""  # what was taken where that was left to us


def choose(engine: str, text: str, needed: int, find: Callable[[], Found] | None = None) -> Chosen:
    """What `--device` means on this machine; `needed` is how many GPUs would be used. UserError names a wrong one."""
    find = find or look
    names = [name.strip() for name in text.split(",")]
    if engine not in REAL:
        if set(names) - {AUTO, CPU}:
            mend = f"a GPU needs --engine {' or '.join(REAL)}"
            raise UserError(f"--device {text}: the {engine} engine runs on the CPU; {mend}")
        return Chosen()
    if names == [AUTO]:
        found = find()
        taken = found.gpus[: max(1, needed)]
        return Chosen(taken, f"--device auto: {', '.join(taken) or f'cpu, because {found.why}'}")
    if set(names) == {CPU}:
        return Chosen()
    return Chosen(tuple(dict.fromkeys(_gpu(name, find) for name in names)))


def sizes_of(gpus: Sequence[str], find: Callable[[], Found] | None = None) -> tuple[int, ...]:
    """The memory of each, bytes; 0: nobody knows."""
    found = (find or look)() if gpus else Found()
    known = dict(zip(found.gpus, found.has_bytes, strict=True))
    return tuple(known.get(gpu, 0) for gpu in gpus)


def exact_note(exact: bool, chosen: Chosen) -> str:
    """What `--exact` costs there, for those who may not know; "" where it costs little."""
    if not (exact and chosen.gpus):
        return ""
    return (
        "--exact on a GPU computes every position by itself, without CUDA graphs: many times slower than --fast; each "
        "engine logs its milliseconds per position as it starts"
    )


def _gpu(name: str, find: Callable[[], Found]) -> str:
    if name in (AUTO, CPU):
        raise UserError(f"--device: {name} stands alone; workers that answer for each other must compute alike")
    if is_host(name):
        raise UserError(f"--device {name}: host memory is called cpu here, and each worker has its own")
    if not name.startswith(("GPU-", "MIG-", "cuda-")):
        raise UserError(f"--device {name!r}: use auto, cpu, cuda-0, or a GPU's UUID (nvidia-smi -L)")
    number = name.removeprefix("cuda-")
    if number.isdigit() and not gpu_uuids():  # some sandboxes show the GPU without the driver's files
        gpus = find().gpus
        if int(number) < len(gpus):
            return gpus[int(number)]
    return device_name(name)


def shows_gpus(devices: Path = Path("/dev")) -> bool:
    """Whether this machine has any, whoever could use them; at once."""
    return any(devices.glob("nvidia[0-9]*")) or bool(gpu_uuids())


def look(devices: Path = Path("/dev")) -> Found:
    """GPUs that the driver shows and torch could use."""
    if not shows_gpus(devices):
        return Found(why="there is no NVIDIA GPU")
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return Found(why="torch is not installed")
    if not _CUDA_BUILD.search((Path(torch.origin).parent / "version.py").read_text()):
        return Found(why="torch here is a build for CPUs")
    return _ask_driver([sys.executable, "-P", "-m", "holdfast.roles.devices"])


def _ask_driver(command: list[str]) -> Found:
    try:
        done = subprocess.run(command, capture_output=True, timeout=LOOK_S, check=False, stdin=subprocess.DEVNULL)
        answer = json.loads(done.stdout)
        return Found(tuple(answer["gpus"]), answer["why"], tuple(answer["has_bytes"]))
    except subprocess.TimeoutExpired:
        return Found(why=f"the driver did not answer within {LOOK_S:g} s")
    except ValueError:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return Found(why=f"asking the driver failed: {last or f'status {done.returncode}'}")


def driver_says() -> Found:
    """Ask the driver, in this process: for a process that ends right after."""
    from holdfast.memory.devices import DeviceError
    from holdfast.memory.devices.cuda import Driver, find_gpu, refuse_unfit

    gpus, sizes, why = [], [], ""
    try:
        driver = Driver()
        for number in range(driver("cuDeviceGetCount")):
            gpu, name = find_gpu(driver, f"cuda-{number}")
            try:
                refuse_unfit(driver, gpu, name)
                sizes.append(int(driver("cuDeviceTotalMem", gpu)))
                gpus.append(name)
            except DeviceError as error:
                why = str(error)
    except DeviceError as error:
        why = str(error)
    return Found(tuple(gpus), why or "the driver shows no GPU", tuple(sizes))


def gpus_of(failover: FailoverSettings) -> tuple[tuple[str, str], ...]:
    """PCI address and UUID of each GPU that an engine's ranks are on; none where the driver does not say: its faults
    reach no worker then, and are told in the log."""
    from holdfast.memory.devices import DeviceError
    from holdfast.memory.devices.cuda import Driver, pci_and_uuid

    names = [failover.device, *(device for _, device in failover.more_vaults)]
    gpus = [name for name in names if not is_host(name)]
    try:
        return tuple(pci_and_uuid(driver, name) for driver in ([Driver()] if gpus else []) for name in gpus)
    except DeviceError as error:
        log.warning("which GPU this is cannot be told (%s): its faults will not be heard of here", error)
        return ()


if __name__ == "__main__":
    shown = driver_says()
    print(json.dumps(asdict(shown)))
