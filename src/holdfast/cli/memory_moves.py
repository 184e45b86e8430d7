"""`holdfast memory demote` and `promote`: move a device's weights to host memory and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec

from holdfast.cli.arguments import Asked, Json
from holdfast.cli.memory import SocketDir, folder_of
from holdfast.cli.terminal import write_out
from holdfast.core.errors import UserError
from holdfast.memory.client import levels
from holdfast.memory.errors import VaultRefused
from holdfast.memory.finding import device_name
from holdfast.memory.protocol import Moved
from holdfast.settings import Environment
from holdfast.spec.names import socket_path
from holdfast.spec.settings import about

GIB = 1024**3


class Move(Asked, frozen=True):
    """What both ask for."""

    device: Annotated[str, about("Device: host-0, a GPU's UUID, or cuda-0.", positional=True, required=True)] = ""
    socket_dir: SocketDir = None
    timeout_s: Annotated[
        float, about("Time limit for waiting; the move itself continues.", "s", flag="--timeout", min=1)
    ] = levels.MOVE_S
    json: Json = False

    def moved(self, env: Environment, move: Callable[[str, float], Awaitable[Moved]]) -> Moved:
        """Have it done; UserError says why it was not."""
        device = device_name(self.device)
        path = socket_path(folder_of(self.socket_dir, env), device)

        async def ask() -> Moved:
            return await move(path, self.timeout_s)

        try:
            return asyncio.run(ask())
        except VaultRefused as refused:
            raise UserError(f"{device}: {refused}") from refused
        except TimeoutError as error:
            goes_on = "the move continues, and `holdfast memory status` shows it"
            raise UserError(f"{device}: not done within {self.timeout_s:g} s; {goes_on}") from error
        except OSError as error:
            raise UserError(f"{device}: {error}") from error

    def show(self, moved: Moved, what: str) -> int:
        if self.json:
            figures = {key: value for key, value in msgspec.structs.asdict(moved).items() if key != "call"}
            write_out(json.dumps({"device": device_name(self.device), **figures}) + "\n")
        else:
            speed = moved.size_bytes / 1e6 / moved.copy_ms if moved.copy_ms else 0.0
            took = f"{moved.took_ms:.0f} ms, copied at {speed:.1f} GB/s"
            write_out(f"{self.device}: {moved.size_bytes / GIB:.2f} GiB {what} in {took}\n")
        return 0


class Demote(Move, frozen=True):
    """`holdfast memory demote`."""

    def run(self, env: Environment) -> int:
        return self.show(self.moved(env, levels.demote), "moved to host memory")


class Promote(Move, frozen=True):
    """`holdfast memory promote`."""

    def run(self, env: Environment) -> int:
        return self.show(self.moved(env, levels.promote), "moved back to the device")
