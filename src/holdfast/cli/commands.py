"""Every command of `holdfast` as one row of a table: what is written, what it does, and the struct that does it.

A row names a struct by its module; only the one that was asked for is imported, and with it the rooms that it needs. So
`holdfast ps` loads what looks, and nothing that serves.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from holdfast.cli.arguments import Asked

RUN = "Run and watch"
CHANGE = "Change a running deployment (from a manifest)"
FLEET = "Fleet: many models on many devices"
PARTS = "Run single processes"
BREAK = "Inject faults and measure"
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
    """One row: what is written, what it does, and the struct that does it ("" for a group of others)."""

    words: str
    panel: str
    about: str
    asked: str = ""

    @property
    def summary(self) -> str:
        return self.about.partition("\n\n")[0]

    def load(self) -> type[Asked]:
        module, _, name = self.asked.partition(":")
        found: type[Asked] = getattr(importlib.import_module(f"holdfast.cli.{module}"), name)
        return found


COMMANDS = (
    Command(
        "up",
        RUN,
        "Start everything: store, vaults, workers with their standbys, frontend and control. Ctrl-C stops it.\n\n"
        "By default it serves a real model, SmolLM2-135M-Instruct; `--engine sim` is a simulator that answers with "
        "random words. With `-f` it runs a manifest. If the store already has a revision of this deployment in place, "
        "it continues from there and the file is ignored (use `apply`).",
        "start:Up",
    ),
    Command("down", RUN, "Stop everything, even if its supervisor has died.", "down:Down"),
    Command("ps", RUN, "List processes: state, streams, address, and what is wrong with them.", "ps:Ps"),
    Command("top", RUN, "Live view: workers' health and tokens/s, degradation level, recent incidents.", "top:Top"),
    Command("queue", RUN, "List waiting requests: model and place in the queue. `--kill` ends one.", "queue:Queue"),
    Command("incidents", RUN, "Show what failed and why, what took over, and how long streams paused.", "ps:Incidents"),
    Command(
        "chat",
        RUN,
        "Chat with a model. A mark in the margin shows where an engine died and its standby took over.",
        "chat.talk:Chat",
    ),
    Command(
        "apply",
        CHANGE,
        "Roll out a manifest as a new revision, which replaces the current one without losing a stream.\n\n"
        "A bad revision is rolled back automatically. With `--wait`, the exit status is 0 once it is in place, and 1 "
        "if it fails.",
        "deployments.change:Apply",
    ),
    Command(
        "diff",
        CHANGE,
        "Show what applying a manifest would change. Exit status: 0 no changes, 1 changes, >1 error.",
        "deployments.change:Diff",
    ),
    Command("get", CHANGE, "List deployments and their status; `-o yaml` prints the manifest.", "deployments.look:Get"),
    Command(
        "delete",
        CHANGE,
        "Delete a deployment: its streams have 30 s to finish, then its processes and records are removed.",
        "deployments.removal:Delete",
    ),
    Command("rollout", CHANGE, "Show the progress and history of changes; pause, resume or undo a change."),
    Command(
        "rollout status",
        "",
        "Wait until the last change is in place. Exit status 1 if it was undone or is stuck.",
        "deployments.rollout:Status",
    ),
    Command("rollout history", "", "List past revisions, and the outcome of each.", "deployments.rollout:History"),
    Command(
        "rollout pause",
        "",
        "Start and drain no further replicas until resumed.",
        "deployments.rollout:Pause",
    ),
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
        "Add a model to the fleet, or change one: by options, or with `-f` by a manifest of one worker service.\n\n"
        "This writes the desired state to the store; the fleet (`holdfast up --backend local`) carries it out. A new "
        "version replaces the old one replica by replica. With `--wait`, the exit status is 0 once the desired number "
        "of replicas is HOT, and 1 if that fails.",
        "fleet.deploy:Deploy",
    ),
    Command("scale", FLEET, "Set how many replicas of a model are HOT (on a device, serving).", "fleet.change:Scale"),
    Command(
        "evict",
        FLEET,
        "Scale a model to zero and free its device memory; it stays deployed.\n\n"
        "A later request starts it again if it is autoscaled; otherwise requests fail until `holdfast scale` sets more "
        "replicas. With REPLICA, only that replica is drained, and another is started if needed (`--shrink`: never).",
        "fleet.change:Evict",
    ),
    Command(
        "node",
        FLEET,
        "Join a fleet with this machine as one more node. Ctrl-C drains its replicas and leaves the fleet.\n\n"
        "The fleet was started by `holdfast up --backend local`, here or elsewhere; `--store` names its store. Several "
        "nodes on one machine need a name each (`--node`).",
        "fleet.node:Node",
    ),
    Command("models", FLEET, "List models: desired, HOT and WARM replicas, and what is missing.", "fleet.look:Models"),
    Command(
        "events",
        FLEET,
        "Print the fleet's current state as events, and with `--follow` each change: deploy, scale, evict, "
        "kill_request, replica, queue_state.",
        "fleet.events:Events",
    ),
    Command("nodes", FLEET, "List nodes: devices, host memory, and how much of each is leased.", "fleet.look:Nodes"),
    Command(
        "worker",
        PARTS,
        "Run a worker: it hosts an engine, registers in the store and serves frontends.\n\n"
        "With a lock (`--lock`, `$FAILOVER_LOCK_PATH`) it is a standby until it gets the lock, and keeps its memory in "
        "its device's vault (`--vault-socket`, or in `$GMS_SOCKET_DIR`; `holdfast memory serve` runs one).",
        "start:Worker",
    ),
    Command(
        "frontend",
        PARTS,
        "Run a frontend: the OpenAI-compatible HTTP server. Several may share one port.",
        "start:Frontend",
    ),
    Command(
        "control",
        PARTS,
        "Run a control: it checks workers with known-answer requests and decides how much traffic each gets.\n\n"
        "Several may run for one deployment; the one that has the lock (`--lock`) leads, and another takes over when "
        "it ends. While no control runs, serving continues with the last decisions.",
        "start:Control",
    ),
    Command("store", PARTS, "Run the embedded store (service discovery) for one machine or a few.", "start:Store"),
    Command("memory", PARTS, "GPU and host memory that outlives processes: serve it, show it, move it."),
    Command(
        "memory serve",
        "",
        "Run a vault (memory service) and its keeper for each device, in the foreground. Ctrl-C stops them.\n\n"
        "Stopping them releases the memory; if the vault is killed, its keeper holds the memory.",
        "memory:Serve",
    ),
    Command("memory status", "", "Show the vaults of this machine, and what is in them.", "memory:Show"),
    Command(
        "memory demote",
        "",
        "Move a device's weights to host memory, and free the device memory.\n\n"
        "No process may have them mapped. A KV pool without an owner is freed too. The vault needs a host budget "
        "(`memory serve --host-budget-gib`); weights in host memory are lost if the vault is killed.",
        "memory_moves:Demote",
    ),
    Command(
        "memory promote",
        "",
        "Move a device's weights from host memory back to the device, unchanged; engines waiting for them get them.",
        "memory_moves:Promote",
    ),
    Command("lock", PARTS, "Serve the lock by which a group of engines elects its active one."),
    Command(
        "lock serve",
        "",
        "Serve one election lock, in the foreground. Ctrl-C stops it.\n\n"
        "Engines use it with `holdfast worker --lock lock+tcp://host:port --lock-token-file FILE`. On TCP a token is "
        "required. If it restarts with the same state file within the window, the holder keeps the lock.",
        "locks:Serve",
    ),
    Command("chaos", BREAK, FAULTS, "chaos:Chaos"),
    Command("bench", BREAK, "Run the benchmarks behind every published figure."),
    Command("bench frontend", "", "Measure the frontend's CPU time per streamed token.", "bench:Frontend"),
    Command(
        "bench memory",
        "",
        "Measure what sharing weights through a vault costs: remap and unmap times, and the memory used.",
        "bench:Memory",
    ),
    Command(
        "bench warm",
        "",
        "Measure how long moving weights takes between a device and host memory (demote and promote, repeated).",
        "bench:Warm",
    ),
    Command(
        "bench failover",
        "",
        "End the active engine repeatedly under load: lost and wrong answers, and the pauses that clients saw.",
        "bench:Failover",
    ),
    Command(
        "bench overload",
        "",
        "Overload workers from two frontends with 3:1 clients; count requests served, refused and lost.",
        "bench:Overload",
    ),
    Command(
        "bench health",
        "",
        "Inject each fault into one of four workers under load: what was detected, how soon, and at what cost.\n\n"
        "Exits with 1 if a stream was lost, a fault was missed or a healthy worker was blamed. Canaries are sent more "
        "often than by default; all thresholds are the defaults.",
        "bench:Health",
    ),
    Command(
        "bench degrade",
        "",
        "Stop workers one by one until none is left, then resume them, under load of all tiers: degradation levels, "
        "batch sizes, and which requests were refused.\n\n"
        "Exits with 1 if levels, refusals and batch sizes did not follow and return, premium was refused before level "
        "4, or a noisy bound made levels flap. Times are shorter than the defaults; bounds and rules are not.",
        "bench:Degrade",
    ),
    Command(
        "bench engine",
        "",
        "Measure how fast the torch engine decodes on this CPU, with --fast and --exact, compared with transformers.",
        "bench:Engine",
    ),
)
