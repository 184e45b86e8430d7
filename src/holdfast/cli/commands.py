"""Lists the `holdfast` commands: one row for each name, with its help and the struct that runs it.

A row names a struct by its module. Only the module of the given command is imported, and with it the packages that it
needs: `holdfast status` loads nothing that serves.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from holdfast.cli.arguments import CommandOptions

RUN = "Run and watch"
CHANGE = "Change a running deployment (from a manifest)"
FLEET = "Fleet: many models on many devices"
PARTS = "Run single processes"
BREAK = "Inject faults"
FAULTS = """\
Inject a fault into a worker (start it with --allow-chaos).

Faults:

- crash – the process kills itself (SIGKILL)
- stop – the process stops itself (SIGSTOP)
- wedge – the process lives, but its engine stops making progress
- slow – everything takes --factor times as long
- wrong-tokens – every token is a wrong one
- drift-logprobs – every logprob is lower by --by
- wrong-canaries – canaries (control's known-answer checks) are answered wrongly, clients correctly
- wrong-proofs – the next --times proofs after a takeover give a wrong result
- wrong-verify – verifying its weights reports damage, though there is none
- cut – running streams vanish without an end
- error-after – running streams fail after --tokens more
- error-every – one in --every new streams fails after its first token
- zero-tokens – new streams end at once, successfully and without a token
- truncate – new streams vanish without an end after --tokens
- late-pongs, late-beats – its answers to pings, or its heartbeats, come --ms late
- reset – its connections are reset
- wake-fails, wake-hangs – a standby's next takeover fails, or never ends
- device-error – as if this process had lost its GPU: it exits at once
- memory-flip – its view of the weights is damaged
- flip-bits – 1 to 8 random bits of its weights (chosen by --seed) read wrong; works with real models too
- clear – undo what can be undone"""


@dataclass(frozen=True, slots=True)
class Command:
    """A row of the table: a command, or a group of commands (`struct` is empty)."""

    words: str  # its name, e.g. "get models"
    panel: str  # heading in `holdfast --help`
    about: str
    struct: str = ""  # "module:name"
    settings: str = ""  # its name in the `commands` of settings (default: `words`)
    also: tuple[str, ...] = ()  # aliases: earlier names and singular forms
    expert: bool = False  # listed only by `--help-all`

    @property
    def summary(self) -> str:
        return self.about.partition("\n\n")[0]

    @property
    def group(self) -> str:
        return self.words.rpartition(" ")[0]

    def load(self) -> type[CommandOptions]:
        module, _, name = self.struct.partition(":")
        found: type[CommandOptions] = getattr(importlib.import_module(f"holdfast.cli.{module}"), name)
        return found


COMMANDS = (
    Command(
        "up",
        RUN,
        "Start store, vaults, workers with standbys, frontend and control. Ctrl-C stops them.\n\n"
        "By default it serves a real model, SmolLM2-135M-Instruct; `--engine sim` is a simulator that answers with "
        "random words. With `-f` it runs a manifest. If the store already has a revision of this deployment in place, "
        "it continues from there and the file is ignored (use `apply`).",
        "start:UpCommand",
    ),
    Command("down", RUN, "Stop everything, even if its supervisor has died.", "down:DownCommand"),
    Command(
        "status",
        RUN,
        "List processes: state, streams, address, and what is wrong with them.\n\n"
        "With `--watch`, a live view: workers' health and tokens/s, degradation level, recent incidents.",
        "top:StatusCommand",
        also=("ps",),
    ),
    Command(
        "top",
        RUN,
        "Live view: workers' health and tokens/s, degradation level, recent incidents.",
        "top:TopCommand",
        expert=True,
    ),
    Command(
        "chat",
        RUN,
        "Chat with a model; a mark in the margin shows where an answer was interrupted.",
        "chat.talk:ChatCommand",
    ),
    Command(
        "get",
        RUN,
        "List deployments, models, nodes, requests, events or incidents.\n\n"
        "`holdfast get [NAME]` and `holdfast get deployments [NAME]` list deployments and their status; `-o yaml` "
        "prints the manifest.",
        "deployments.look:Get",
    ),
    Command(
        "get models",
        "",
        "List models: desired, HOT and WARM replicas, and what is missing.",
        "fleet.look:Models",
        also=("models", "get model"),
    ),
    Command(
        "get nodes",
        "",
        "List nodes: devices, host memory, and how much of each is leased.",
        "fleet.look:Nodes",
        also=("nodes", "get node"),
    ),
    Command(
        "get requests",
        "",
        "List requests: state, place in the queue, worker, tokens so far.",
        "requests:RequestsCommand",
        also=("get request",),
    ),
    Command(
        "queue",
        RUN,
        "List waiting requests (use `get requests`); `--kill` ends one (use `delete request`).",
        "requests:QueueCommand",
        expert=True,
    ),
    Command(
        "get events",
        "",
        "Print the fleet's current state as events, and with `--follow` each change: deploy, scale, evict, "
        "kill_request, replica, queue_state.",
        "fleet.events:Events",
        also=("events", "get event"),
    ),
    Command(
        "get incidents",
        "",
        "Show what failed and why, what took over, and how long streams paused.",
        "status:IncidentsCommand",
        also=("incidents", "get incident"),
    ),
    Command(
        "get memory",
        "",
        "Show the vaults of this machine, and what is in them.",
        "memory:MemoryCommand",
        also=("memory status",),
        expert=True,
    ),
    Command(
        "apply",
        CHANGE,
        "Roll out a manifest as a new revision, without losing a stream.\n\n"
        "A bad revision is rolled back automatically. With `--wait`, the exit status is 0 once it is in place, and 1 "
        "if it fails.",
        "deployments.change:Apply",
    ),
    Command(
        "diff",
        CHANGE,
        "Show what applying a manifest would change.\n\nExit status: 0 no changes, 1 changes, >1 error.",
        "deployments.change:Diff",
    ),
    Command(
        "delete",
        CHANGE,
        "Delete a deployment, or with `delete request ID` end a request.\n\n"
        "A deployment's streams have 30 s to finish, then its processes and records are removed.",
        "deployments.removal:Delete",
    ),
    Command(
        "delete request", "", "End a queued or running request; its client gets an error.", "requests:EndRequestCommand"
    ),
    Command("rollout", CHANGE, "Show the progress and history of changes; pause, resume or undo a change."),
    Command(
        "rollout status",
        "",
        "Wait until the last change is in place. Exit status 1 if it was undone or is stuck.",
        "deployments.rollout:Status",
    ),
    Command("rollout history", "", "List past revisions, and the outcome of each.", "deployments.rollout:History"),
    Command("rollout pause", "", "Start and drain no further replicas until resumed.", "deployments.rollout:Pause"),
    Command("rollout resume", "", "Continue a paused rollout.", "deployments.rollout:Resume"),
    Command(
        "rollout undo",
        "",
        "Roll back: during a rollout to the revision in place before it, otherwise to the previous one.",
        "deployments.rollout:Undo",
    ),
    Command(
        "deploy",
        FLEET,
        "Add a model to the fleet, or change one.\n\n"
        "The model is given by options, or with `-f` by a manifest of one worker service. This "
        "writes the desired state to the store; the fleet (`holdfast up --backend local`) carries it out. A new "
        "version replaces the old one replica by replica. With `--wait`, the exit status is 0 once the desired number "
        "of replicas is HOT, else 1.",
        "fleet.deploy:Deploy",
    ),
    Command(
        "scale",
        FLEET,
        "Set how many replicas a service of a manifest has, or how many of a fleet's model are HOT (on a device, "
        "serving).\n\n"
        "The number holds until the next `holdfast scale`, or until a manifest with another number of replicas is "
        "applied; it is no part of a revision. `holdfast rollout undo` takes it back.",
        "deployments.scale:Scale",
    ),
    Command(
        "evict",
        FLEET,
        "Scale a model to zero and free its device memory; it stays deployed.\n\n"
        "A later request starts it again if it is autoscaled; otherwise requests fail until `holdfast scale` sets more "
        "replicas. With REPLICA, only that replica is drained, and another is started if needed (`--shrink`: never).",
        "fleet.change:Evict",
    ),
    Command(
        "drain",
        FLEET,
        "Move all replicas of a node to other nodes, so that the node can be stopped without losing a request.\n\n"
        "The node takes no new replicas from then on, even if it leaves and joins again; `--undo` uses it again. Each "
        "replica is replaced first, and leaves when its replacement serves. A replica that fits on no other node stays "
        "and serves. Exit status: 0 once the node is empty, 1 if it is not after `--timeout`; the drain then goes on.",
        "fleet.drain:Drain",
    ),
    Command(
        "node join",
        FLEET,
        "Join a fleet with this machine. Ctrl-C drains its replicas and leaves the fleet.\n\n"
        "The fleet was started by `holdfast up --backend local`, here or elsewhere; `--store` names its store. Several "
        "nodes on one machine need a name each (`--node`).",
        "fleet.node:Node",
        settings="node",
        also=("node",),
    ),
    Command("run", PARTS, "Run one process in the foreground: worker, frontend, control, store, vault or lock."),
    Command(
        "run worker",
        "",
        "Run a worker: it hosts an engine, registers in the store and serves frontends.\n\n"
        "With a lock (`--lock`, `$FAILOVER_LOCK_PATH`) it is a standby until it gets the lock, and keeps its memory in "
        "its device's vault (`--vault-socket`, or in `$GMS_SOCKET_DIR`; `holdfast run vault` runs one).",
        "start:WorkerCommand",
        settings="worker",
        also=("worker",),
    ),
    Command(
        "run frontend",
        "",
        "Run a frontend: the OpenAI-compatible HTTP server. Several may share one port.",
        "start:FrontendCommand",
        settings="frontend",
        also=("frontend",),
    ),
    Command(
        "run control",
        "",
        "Run a control: it checks workers with known-answer requests and decides how much traffic each gets.\n\n"
        "Several may run for one deployment; the one that has the lock (`--lock`) leads, and another takes over when "
        "it ends. While no control runs, serving continues with the last decisions.",
        "start:ControlCommand",
        settings="control",
        also=("control",),
    ),
    Command(
        "run store",
        "",
        "Run the embedded store (service discovery) for one machine or a few.",
        "start:StoreCommand",
        settings="store",
        also=("store",),
    ),
    Command(
        "run vault",
        "",
        "Run a vault (memory service) and its keeper for each device. Ctrl-C stops them.\n\n"
        "Stopping them releases the memory; if the vault is killed, its keeper holds the memory.",
        "memory:VaultCommand",
        also=("memory serve",),
    ),
    Command(
        "run lock",
        "",
        "Run a lock server: a group of engines elects its active one with it. Ctrl-C stops it.\n\n"
        "Engines use it with `holdfast run worker --lock lock+tcp://host:port --lock-token-file FILE`. On TCP a token "
        "is required. If it restarts with the same state file within the window, the holder keeps the lock.",
        "start:LockCommand",
        also=("lock serve",),
    ),
    Command("lock", PARTS, "Serve the lock by which a group of engines elects its active one.", expert=True),
    Command("memory", PARTS, "Move weights between a device and host memory.", expert=True),
    Command(
        "memory demote",
        "",
        "Move a device's weights to host memory, and free the device memory.\n\n"
        "No process may have them mapped. A KV pool without an owner is freed too. The vault needs a host budget "
        "(`run vault --host-budget-gib`); weights in host memory are lost if the vault is killed.",
        "memory:DemoteCommand",
    ),
    Command(
        "memory promote",
        "",
        "Move a device's weights from host memory back to the device, unchanged; engines waiting for them get them.",
        "memory:PromoteCommand",
    ),
    Command("chaos", BREAK, FAULTS, "chaos:ChaosCommand"),
)
