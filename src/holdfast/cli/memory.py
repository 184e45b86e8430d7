"""`holdfast run vault` runs vaults, `get memory` shows them, and `memory demote` and `promote` move weights between a
device and host memory.

Always true: when `run vault` ends, for whatever reason, its vaults and keepers end. A vault that does not answer within
a second is shown as silent and does not delay the others.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from holdfast.cli.arguments import CommandOptions, Json
from holdfast.cli.checks import made
from holdfast.cli.screen import Screen, tilde
from holdfast.cli.terminal import Cell, write_out
from holdfast.core.address import TcpAddress, parse_address
from holdfast.core.errors import UserError
from holdfast.core.limits import raise_descriptor_limit
from holdfast.core.tasks import Tasks, done_before
from holdfast.memory.client import calls
from holdfast.memory.client.calls import VaultRefused, call_once
from holdfast.memory.devices import device_name, gpu_uuids
from holdfast.memory.protocol import GetStatus, Moved
from holdfast.memory.vault.launch import VaultProcesses
from holdfast.memory.vault.settings import VaultSettings
from holdfast.settings import Environment
from holdfast.spec.names import socket_path
from holdfast.spec.settings import about

GIB = 1024**3
ASK_S = 1.0
READY_S = 60.0  # a vault starts in 0.2 s; where every process waits long for a CPU, in a quarter of a minute
PAGE_S = 0.5
SHOWN_MAX = 30  # lines of history per vault

Facts = dict[str, Any]
SocketDir = Annotated[
    Path | None, about("Directory of the vaults' sockets (default: $GMS_SOCKET_DIR, or `gms` in the state directory).")
]


# -- serve


class VaultCommand(CommandOptions, frozen=True):
    """Runs vaults in the foreground and shows their log lines, one per event."""

    device: Annotated[
        tuple[str, ...], about("Device to serve: host-0, a GPU's UUID (nvidia-smi -L), or cuda-0; may be repeated.")
    ] = ()
    every: Annotated[bool, about("Serve all GPUs of this machine, and host-0.", flag="--all")] = False
    socket_dir: SocketDir = None
    budget_gib: Annotated[
        float, about("Maximum memory per device, weights plus KV pool (0: all there is).", "GiB", min=0)
    ] = 0.0
    host_budget_gib: Annotated[
        float, about("Maximum host memory per device for demoted weights (0: none).", "GiB", min=0)
    ] = 0.0
    allow_uid: Annotated[tuple[int, ...], about("User ID that may also connect; may be repeated.")] = ()
    status_address: Annotated[
        str, about("Address of /metrics, e.g. tcp://127.0.0.1:0; with several devices the port must be 0.")
    ] = ""

    def run(self, env: Environment) -> int:
        names = [device_name(name) for name in self.device] + (["host-0", *gpu_uuids()] if self.every else [])
        if not names:
            raise UserError("no device is named; use --device host-0, --device cuda-0, or --all")
        folder = folder_of(self.socket_dir, env)
        if folder.exists():
            made(folder, "GMS_SOCKET_DIR, or --socket-dir,")
        names = list(dict.fromkeys(names))
        _check_status_address(self.status_address, len(names))
        raise_descriptor_limit()
        bounds: dict[str, Any] = {
            "budget_bytes": round(self.budget_gib * GIB),
            "host_budget_bytes": round(self.host_budget_gib * GIB),
            "allowed_uids": self.allow_uid,
        }
        page = self.status_address
        made_of = [VaultSettings(name, socket_path(folder, name), **bounds, status_address=page) for name in names]
        return asyncio.run(_serve([VaultProcesses(one) for one in made_of], Screen()))


def folder_of(given: Path | None, env: Environment) -> Path:
    return (given or env.gms_socket_dir).absolute()


def _check_status_address(text: str, devices: int) -> None:
    if not text:
        return
    try:
        address = parse_address(text)
    except ValueError as error:
        raise UserError(f"--status-address: {error}") from error
    if devices > 1 and not (isinstance(address, TcpAddress) and address.port == 0):
        raise UserError(f"{devices} vaults cannot all listen on {text}; use port 0, each picks its own")


async def _serve(vaults: list[VaultProcesses], screen: Screen) -> int:
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, over.set)
    tasks = Tasks("vaults")
    try:
        for vault in vaults:
            vault.start()
            tasks.spawn(vault.watch(), vault.settings.device)
        for vault in vaults:
            await done_before(over, _ready(vault, screen), "ready")
        if not over.is_set():
            screen.line("Ctrl-C ends it and lets go of the memory; `holdfast get memory` shows it.", style="dim")
        await over.wait()
    finally:
        await tasks.stop()
        for vault in vaults:
            vault.stop()
            screen.event(f"{vault.settings.device}: vault and keeper have ended")
    return 0


async def _ready(vault: VaultProcesses, screen: Screen) -> None:
    path = vault.settings.socket_path
    facts = await _ask(path, READY_S)
    if vault.settings.status_address and not facts.get("status_address"):
        await asyncio.sleep(PAGE_S)  # the status page starts shortly after the vault
        facts = await _ask(path, READY_S)
    if "error" in facts:
        raise UserError(f"{vault.settings.device} has no vault: {facts['error']}; the lines above say why")
    page = f", metrics at {facts['status_address']}" if facts.get("status_address") else ""
    screen.event(f"{vault.settings.device}: vault ready, pid {facts['pid']}, socket {tilde(Path(path))}{page}")


# -- status


class MemoryCommand(CommandOptions, frozen=True):
    socket_dir: SocketDir = None
    history: Annotated[bool, about("Also show recent events.")] = False
    json: Json = False

    def run(self, env: Environment) -> int:
        folder = folder_of(self.socket_dir, env)
        found = asyncio.run(ask_all(sorted(str(path) for path in folder.glob("gms_*.sock"))))
        if not self.json:
            return _show(folder, found, self.history)
        for facts in found if not self.history else ():
            facts.pop("history", None)
        write_out(json.dumps(found, indent=2) + "\n")
        return 0


def _show(folder: Path, found: list[Facts], history: bool) -> int:
    screen = Screen()
    if not found:
        screen.line(f"no vault in {tilde(folder)}; start one with `holdfast run vault --device host-0`")
        return 0
    titles = ("device", "weights", "identity", "GiB", "host GiB", "readers", "waiting", "pool", "pool GiB", "pid")
    right = ("GiB", "host GiB", "readers", "waiting", "pool GiB", "pid")
    screen.terminal.table(titles, [_row(facts) for facts in found], right)
    for facts in found if history else ():
        screen.line(f"\n{facts['device']}", style="bold")
        for event in facts.get("history", ())[-SHOWN_MAX:]:
            screen.line(f"{time.strftime('%H:%M:%S', time.localtime(event['at']))} {event['what']}")
    return 0


async def ask_all(paths: list[str]) -> list[Facts]:
    """Ask all vaults at once and return their facts; a vault that does not answer has an `error` instead."""
    return list(await asyncio.gather(*(_ask(path, ASK_S) for path in paths)))


async def _ask(path: str, within_s: float) -> Facts:
    device = Path(path).name.removeprefix("gms_").removesuffix(".sock")
    try:
        async with asyncio.timeout(within_s):
            answer = await call_once(path, GetStatus, within_s, connect_s=within_s, vault_uids=None)
        facts: Facts = json.loads(answer.facts)
        return facts | {"socket": path}
    except TimeoutError:
        return {"device": device, "socket": path, "error": f"no answer within {within_s:g} s"}
    except (OSError, VaultRefused) as error:
        refused = isinstance(error, ConnectionRefusedError)
        why = "its vault was killed and has not been restarted" if refused else str(error)
        return {"device": device, "socket": path, "error": why}


def _row(facts: Facts) -> list[Cell]:
    if "error" in facts:
        return [(facts["device"], ""), (facts["error"], "red")]
    sizes = (f"{facts[name] / GIB:.2f}" for name in ("weights_bytes", "host_bytes"))
    weights = (facts["device"], facts["weights"], facts["identity"] or "", *sizes)
    pool = (facts["pool"], f"{facts['pool_bytes'] / GIB:.2f}", facts["pid"])
    return [(str(text), "") for text in (*weights, facts["readers"], facts["waiting"], *pool)]


# -- `holdfast memory demote` and `promote`


class MoveCommand(CommandOptions, frozen=True):
    """The options that `demote` and `promote` share."""

    device: Annotated[str, about("Device: host-0, a GPU's UUID, or cuda-0.", positional=True, required=True)] = ""
    socket_dir: SocketDir = None
    timeout_s: Annotated[
        float, about("Time limit for waiting; the move itself continues.", "s", flag="--timeout", min=1)
    ] = calls.MOVE_S
    json: Json = False

    def carry_out(self, env: Environment, move: Callable[[str, float], Awaitable[Moved]], what: str) -> int:
        """Move the weights and show the result; raise UserError if they were not moved."""
        device = device_name(self.device)
        path = socket_path(folder_of(self.socket_dir, env), device)

        async def ask() -> Moved:
            return await move(path, self.timeout_s)

        try:
            moved = asyncio.run(ask())
        except VaultRefused as refused:
            raise UserError(f"{device}: {refused}") from refused
        except TimeoutError as error:
            goes_on = "the move continues, and `holdfast get memory` shows it"
            raise UserError(f"{device}: not done within {self.timeout_s:g} s; {goes_on}") from error
        except OSError as error:
            raise UserError(f"{device}: {error}") from error
        if self.json:
            figures = {key: value for key, value in msgspec.structs.asdict(moved).items() if key != "call"}
            write_out(json.dumps({"device": device, **figures}) + "\n")
        else:
            speed = moved.size_bytes / 1e6 / moved.copy_ms if moved.copy_ms else 0.0
            took = f"{moved.took_ms:.0f} ms, copied at {speed:.1f} GB/s"
            write_out(f"{self.device}: {moved.size_bytes / GIB:.2f} GiB {what} in {took}\n")
        return 0


class DemoteCommand(MoveCommand, frozen=True):
    def run(self, env: Environment) -> int:
        return self.carry_out(env, calls.demote, "moved to host memory")


class PromoteCommand(MoveCommand, frozen=True):
    def run(self, env: Environment) -> int:
        return self.carry_out(env, calls.promote, "moved back to the device")
