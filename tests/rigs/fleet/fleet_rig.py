"""A fleet of one machine from outside: nodes, models and requests by its commands, and what is killed of it.

The first node is the one that `holdfast up --backend local` is; others join it. Always true: what a request is answered
depends on its model and number alone, so that the same request can be compared later.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from holdfast.spec.names import node_dir
from holdfast.testing.processes import processes_in
from holdfast.testing.rig import DeploymentRig

ASKED_S = 180.0  # for an answer, with its model being brought on a loaded machine
FIRST = "n1"


class FleetRig(DeploymentRig):
    """`devices` of `gib` each, or the GPU `device`, and `host_gib` for WARM replicas, of every node; `nodes`: how many.
    `more`: of `holdfast up`'s options."""

    def __init__(
        self, *more: str, nodes: int = 1, devices: int = 2, gib: float = 0.5, host_gib: float = 0.0, device: str = ""
    ) -> None:
        super().__init__()
        self.names = [f"n{number + 1}" for number in range(nodes)]
        of_host = ("--node-devices", str(devices), "--node-gib", str(gib))
        self._has = (*(("--device", device) if device else of_host), "--node-host-gib", str(host_gib))
        self._more = more

    def begin(self) -> None:
        self.up()
        for name in self.names[1:]:
            self.join(name)

    def up(self) -> None:
        """Start the first node with the store, the frontend and the control; or only its agent, if that has ended."""
        ports = ("--port", str(self.port), "--status-port", "0")
        self.told("up", "--backend", "local", "--detach", "--node", FIRST, *self._has, *ports, *self._more)

    def join(self, name: str) -> None:
        self.told("node", "--detach", "--node", name, *self._has)

    def told(self, *words: str) -> str:
        """Run a command that must succeed; return its output."""
        said = self.run(*words)
        assert said.returncode == 0, said
        return said.stdout

    # -- looking

    def model(self, key: str) -> dict[str, Any]:
        return json.loads(self.told("models", key, "--json"))  # type: ignore[no-any-return]

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Return them by name, as the store has them."""
        return {one["name"]: one for one in json.loads(self.told("nodes", "--json"))}

    def leased(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Return what is leased of each device of each node, and its size."""
        return {
            (node, one["name"]): (one["leased_bytes"], one["total_bytes"])
            for node, told in self.nodes().items()
            for one in told["devices"]
        }

    def folder_of(self, node: str) -> Path:
        return self.folder if node == FIRST else node_dir(self.folder, node)

    def processes_of(self, node: str) -> dict[str, dict[str, Any]]:
        """Return the records of a node's processes by name."""
        found = {}
        for path in sorted((self.folder_of(node) / "run").glob("*.json")):
            with contextlib.suppress(OSError, ValueError):
                found[path.stem] = json.loads(path.read_bytes())
        return found

    def vault_sockets(self, node: str) -> list[str]:
        """Return the sockets of a node's vaults, also of those that have ended."""
        return sorted(str(path) for path in (self.folder_of(node) / "gms").glob("gms_*.sock"))

    def engine_pids(self, *nodes: str) -> dict[str, int]:
        """Return the pids of the engines of these nodes, or of all, by name."""
        found = [record for name in nodes or self.names for record in self.processes_of(name).items()]
        return {name: one["pid"] for name, one in found if one["role"] == "worker"}

    def agent_pid(self, node: str) -> int:
        found: int = self.nodes()[node]["agent_pid"]
        return found

    # -- asking

    def ask(self, model: str, number: int, tokens: int = 40) -> list[int]:
        """Return the tokens of an answer; fail if there is none."""
        body = {"model": model, "prompt": f"story {number}", "max_tokens": tokens, "seed": number}
        body |= {"ignore_eos": True, "return_token_ids": True}
        request = Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(request, timeout=ASKED_S) as answer:
            found: list[int] = json.load(answer)["choices"][0]["token_ids"]
        return found

    # -- breaking

    def kill_agent(self, node: str) -> None:
        """Kill the supervisor alone; its processes live on."""
        os.kill(self.agent_pid(node), signal.SIGKILL)

    def kill_node(self, node: str) -> None:
        """Kill a node that joined and all that runs on it; its agent first, which would restart the others."""
        assert node != FIRST, "the store is there"
        self.kill_agent(node)
        inside = f"{self.folder_of(node)}/"
        while left := [pid for pid, command in processes_in(self.folder).items() if inside in command]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
