"""`holdfast memory`: run vaults until asked to stop, and ask the running ones.

Always true: when `serve` ends, however it ends, its vaults and keepers end; a vault that does not answer within a
second is shown as silent and delays nobody.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Annotated, Any

from holdfast.cli.arguments import Asked, Json
from holdfast.cli.checks import made
from holdfast.cli.screen import Screen, tilde
from holdfast.cli.terminal import Cell, write_out
from holdfast.core.address import TcpAddress, parse_address
from holdfast.core.errors import UserError
from holdfast.core.limits import raise_descriptor_limit
from holdfast.core.tasks import Tasks
from holdfast.memory.client.calls import open_connection
from holdfast.memory.errors import VaultRefused
from holdfast.memory.finding import device_name, gpu_uuids
from holdfast.memory.protocol import GetStatus
from holdfast.memory.vault.launch import VaultProcesses
from holdfast.memory.vault.settings import VaultSettings
from holdfast.settings import Environment
from holdfast.spec.names import socket_path
from holdfast.spec.settings import about

ASK_S = 1.0
READY_S = 10.0
PAGE_S = 0.5
SHOWN_MAX = 30  # lines of history per vault

Facts = dict[str, Any]
SocketDir = Annotated[
    Path | None, about("Directory of the vaults' sockets (default: $GMS_SOCKET_DIR, or `gms` in the state directory).")
]


# -- serve


class Serve(Asked, frozen=True):
    """`holdfast memory serve`: in the foreground; the vaults' own lines appear here, one per event."""

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
            "budget_bytes": round(self.budget_gib * 1024**3),
            "host_budget_bytes": round(self.host_budget_gib * 1024**3),
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
            await _ready(vault, screen, over)
        if not over.is_set():
            screen.line("Ctrl-C ends it and lets go of the memory; `holdfast memory status` shows it.", style="dim")
        await over.wait()
    finally:
        await tasks.stop()
        for vault in vaults:
            vault.stop()
            screen.event(f"{vault.settings.device}: vault and keeper have ended")
    return 0


async def _ready(vault: VaultProcesses, screen: Screen, over: asyncio.Event) -> None:
    """Say that it answers, or that it does not."""
    path = vault.settings.socket_path
    facts = await _ask(path, READY_S)
    if vault.settings.status_address and not facts.get("status_address"):
        await asyncio.sleep(PAGE_S)  # the page comes a moment after the vault
        facts = await _ask(path, READY_S)
    if over.is_set():
        return
    if "error" in facts:
        raise UserError(f"{vault.settings.device} has no vault: {facts['error']}; the lines above say why")
    page = f", metrics at {facts['status_address']}" if facts.get("status_address") else ""
    screen.event(f"{vault.settings.device}: vault ready, pid {facts['pid']}, socket {tilde(Path(path))}{page}")


# -- status


class Show(Asked, frozen=True):
    """`holdfast memory status`."""

    socket_dir: SocketDir = None
    history: Annotated[bool, about("Also show recent events.")] = False
    json: Json = False

    def run(self, env: Environment) -> int:
        folder = folder_of(self.socket_dir, env)
        found = asyncio.run(ask_all(sorted(str(path) for path in folder.glob("gms_*.sock"))))
        return _show_json(found, self.history) if self.json else _show(folder, found, self.history)


def _show_json(found: list[Facts], history: bool) -> int:
    for facts in found if not history else ():
        facts.pop("history", None)
    write_out(json.dumps(found, indent=2) + "\n")
    return 0


def _show(folder: Path, found: list[Facts], history: bool) -> int:
    screen = Screen()
    if not found:
        screen.line(f"no vault in {tilde(folder)}; start one with `holdfast memory serve --device host-0`")
        return 0
    _table(found, screen)
    for facts in found if history else ():
        screen.line(f"\n{facts['device']}", style="bold")
        for event in facts.get("history", ())[-SHOWN_MAX:]:
            screen.line(f"{time.strftime('%H:%M:%S', time.localtime(event['at']))} {event['what']}")
    return 0


async def ask_all(paths: list[str]) -> list[Facts]:
    """Every vault's facts, asked at once; one that is silent has an `error` instead."""
    return list(await asyncio.gather(*(_ask(path, ASK_S) for path in paths)))


async def _ask(path: str, within_s: float) -> Facts:
    device = Path(path).name.removeprefix("gms_").removesuffix(".sock")
    connection = None
    try:
        async with asyncio.timeout(within_s):
            connection, _ = await open_connection(path, f"status-{os.getpid()}", -1, within_s, vault_uids=None)
            answer = await connection.call(GetStatus, within_s)
        facts: Facts = json.loads(answer.facts)
        return facts | {"socket": path}
    except TimeoutError:
        return {"device": device, "socket": path, "error": f"no answer within {within_s:g} s"}
    except (OSError, VaultRefused) as error:
        refused = isinstance(error, ConnectionRefusedError)
        why = "its vault was killed and has not been restarted" if refused else str(error)
        return {"device": device, "socket": path, "error": why}
    finally:
        if connection is not None:
            connection.close()


def _table(found: list[Facts], screen: Screen) -> None:
    titles = ("device", "weights", "identity", "GiB", "host GiB", "readers", "waiting", "pool", "pool GiB", "pid")
    right = ("GiB", "host GiB", "readers", "waiting", "pool GiB", "pid")
    screen.terminal.table(titles, [_row(facts) for facts in found], right)


def _row(facts: Facts) -> list[Cell]:
    if "error" in facts:
        return [(facts["device"], ""), (facts["error"], "red")]
    sizes = (f"{facts[name] / 1024**3:.2f}" for name in ("weights_bytes", "host_bytes"))
    weights = (facts["device"], facts["weights"], facts["identity"] or "", *sizes)
    pool = (facts["pool"], f"{facts['pool_bytes'] / 1024**3:.2f}", facts["pid"])
    return [(str(text), "") for text in (*weights, facts["readers"], facts["waiting"], *pool)]
