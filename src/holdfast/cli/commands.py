"""Every command of `holdfast` as one row of a table: what is written, what it does, and the struct that does it.

A row names a struct by its module; only the one that was asked for is imported, and with it the rooms that it needs. So
`holdfast ps` loads what looks, and nothing that serves.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from holdfast.cli.arguments import Asked

RUN = "Run it"
CHANGE = "Change a manifest's deployment while it serves"
FLEET = "Many models on many devices"
PARTS = "Run one process by hand"
BREAK = "Break it and measure it"
FAULTS = """\
Break a worker on purpose (start it with --allow-chaos).

Faults:

- crash – the process kills itself (SIGKILL)
- stop – the process stops itself (SIGSTOP)
- wedge – the process lives, its engine makes no step any more
- slow – everything takes --factor times as long
- wrong-tokens – every token is another word than it should be
- drift-logprobs – every logprob is lower --by this
- wrong-canaries – control's known questions are answered wrongly, clients rightly
- wrong-proofs – so many proofs after a takeover (--times) come out wrong
- wrong-verify – a verification finds its weights damaged, though they are not
- cut – running streams vanish without an end
- error-after – running streams fail after --tokens more
- error-every – one in --every new streams fails after its first token
- zero-tokens – new streams end at once, as if well, without a token
- truncate – new streams vanish without an end after --tokens
- late-pongs, late-beats – its answers to pings, or its beats, come --ms late
- reset – its connections are reset
- wake-fails, wake-hangs – a standby's next takeover fails, or never ends
- device-error – as a GPU that is lost for this process: it exits at once
- memory-flip – its view of the weights is damaged
- flip-bits – 1 to 8 random bits of its weights read wrong, by --seed; also of a real model's
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
        "By default a real model, SmolLM2-135M-Instruct; `--engine sim` is a simulator that says random words. With "
        "`-f` what a manifest says; what the store holds of it goes on, whatever the file says by now.",
        "start:Up",
    ),
    Command("down", RUN, "Stop everything, whether or not its supervisor lives.", "down:Down"),
    Command("ps", RUN, "Show what runs.", "ps:Ps"),
    Command("top", RUN, "Watch it live: workers, their standing and pace, levels, the last incidents.", "top:Top"),
    Command("queue", RUN, "Show which requests wait, for which model, and in which place.", "queue:Queue"),
    Command("incidents", RUN, "Show what died, why, who went on, and the gap that streams saw.", "ps:Incidents"),
    Command(
        "chat",
        RUN,
        "Talk to it. A mark in the margin shows where an engine died and its standby went on.",
        "chat.talk:Chat",
    ),
    Command(
        "apply",
        CHANGE,
        "Change what should run to what a manifest says: a new revision, which replaces the last without losing a "
        "stream.\n\n"
        "What is bad is undone by itself. With `--wait` it is status 0 once it is in place, and 1 if it will not be.",
        "deployments.change:Apply",
    ),
    Command(
        "diff",
        CHANGE,
        "Show what applying a manifest would change. Status 0: nothing, 1: something, more: it cannot be told.",
        "deployments.change:Diff",
    ),
    Command("get", CHANGE, "Show the deployments there are, and how they are.", "deployments.look:Get"),
    Command(
        "delete",
        CHANGE,
        "Take a deployment away: its streams have half a minute to end, and then nothing is left of it.",
        "deployments.removal:Delete",
    ),
    Command("rollout", CHANGE, "How far a change is, what there was before; pause it, resume it, undo it."),
    Command(
        "rollout status",
        "",
        "Wait until the last change is in place. Status 1, if it was undone or is stuck.",
        "deployments.rollout:Status",
    ),
    Command(
        "rollout history", "", "Show the revisions there were, and what became of each.", "deployments.rollout:History"
    ),
    Command(
        "rollout pause",
        "",
        "Start nobody more, and tell nobody else to leave, until it is resumed.",
        "deployments.rollout:Pause",
    ),
    Command("rollout resume", "", "Go on with what was paused.", "deployments.rollout:Resume"),
    Command(
        "rollout undo",
        "",
        "Go back: in mid-rollout to what was in place, else to what was there before.",
        "deployments.rollout:Undo",
    ),
    Command(
        "deploy",
        FLEET,
        "Ask the fleet for a model, by its options or with `-f` by a manifest of one worker; again, to change it.\n\n"
        "Only what is wanted is written down; the fleet (`holdfast up --backend local`) sees to it. Another version "
        "replaces the last one by one. With `--wait` it is status 0 once as many are HOT as are wanted, and 1 if that "
        "will not be.",
        "fleet.deploy:Deploy",
    ),
    Command("scale", FLEET, "Say how many replicas of a model are to be HOT.", "fleet.change:Scale"),
    Command(
        "evict",
        FLEET,
        "Take a model off its devices: none is wanted and none is kept, and it stays known.",
        "fleet.change:Evict",
    ),
    Command(
        "node",
        FLEET,
        "Join a fleet with this machine as one more node. Ctrl-C: what runs on it ends when it has answered.\n\n"
        "The fleet is one that `holdfast up --backend local` started, here or elsewhere, and its store is what "
        "`--store` names. Several nodes on one machine need a name each.",
        "fleet.node:Node",
    ),
    Command("models", FLEET, "Show models: how many are wanted, what is there, what is missing.", "fleet.look:Models"),
    Command(
        "events",
        FLEET,
        "Show what stands in the fleet's store as events, and with `--follow` what happens: deploy, scale, evict, "
        "kill_request, replica, queue_state.",
        "fleet.events:Events",
    ),
    Command("nodes", FLEET, "Show nodes: their devices and host memory, and who has leased it.", "fleet.look:Nodes"),
    Command(
        "worker",
        PARTS,
        "A worker: hosts an engine, registers in the store, serves frontends.\n\n"
        "With a lock (`--lock`, `$FAILOVER_LOCK_PATH`) it stands by until it has it, with its memory in the vault of "
        "its device (`--vault-socket`, or in `$GMS_SOCKET_DIR`; `holdfast memory serve` runs one).",
        "start:Worker",
    ),
    Command(
        "frontend",
        PARTS,
        "A frontend: the OpenAI-compatible HTTP server. Several may share one port.",
        "start:Frontend",
    ),
    Command(
        "control",
        PARTS,
        "A control: checks workers with known questions, and decides about their traffic.\n\n"
        "Several may run for one deployment; the one that has the lock (`--lock`) leads, and the next goes on when it "
        "ends. Without one serving goes on as last decided.",
        "start:Control",
    ),
    Command("store", PARTS, "The embedded store: who serves what, for one machine or a few.", "start:Store"),
    Command("memory", PARTS, "Memory that outlives processes: serve it, look at it, move it."),
    Command(
        "memory serve",
        "",
        "Keep the memory of devices: a vault and its keeper for each, in the foreground. Ctrl-C ends them.\n\n"
        "Ending them lets go of the memory; killing them does not.",
        "memory:Serve",
    ),
    Command("memory status", "", "Show the vaults of this machine, and what they keep.", "memory:Show"),
    Command(
        "memory demote",
        "",
        "Move a device's weights to host memory, and give the device's memory back.\n\n"
        "Nobody may have them mapped. A KV pool that nobody owns goes. The vault needs a host budget "
        "(`memory serve --host-budget-gib`); what is in host memory is lost if the vault is killed.",
        "memory_moves:Demote",
    ),
    Command(
        "memory promote",
        "",
        "Move a device's weights from host memory back to the device, as they were; engines that wait get them.",
        "memory_moves:Promote",
    ),
    Command("lock", PARTS, "Elect one engine of a group: serve the lock they take turns with."),
    Command(
        "lock serve",
        "",
        "Serve one election lock, in the foreground. Ctrl-C ends it.\n\n"
        "Engines use it with `holdfast worker --lock lock+tcp://host:port --lock-token-file FILE`. On TCP a token is "
        "needed. Started again with the same state file within the window, it takes the lock from nobody.",
        "locks:Serve",
    ),
    Command("chaos", BREAK, FAULTS, "chaos:Chaos"),
    Command("bench", BREAK, "Measure it; every published figure comes from here."),
    Command("bench frontend", "", "What one streamed token costs the frontend, in CPU time.", "bench:Frontend"),
    Command(
        "bench memory",
        "",
        "What sharing weights through a vault costs: remap and unmap against their floor, and the memory used.",
        "bench:Memory",
    ),
    Command(
        "bench warm",
        "",
        "What moving weights between a device and host memory takes: demoted and promoted again and again.",
        "bench:Warm",
    ),
    Command(
        "bench failover",
        "",
        "End the active engine again and again under load: what clients lost, saw wrong, or waited for.",
        "bench:Failover",
    ),
    Command(
        "bench overload",
        "",
        "Two frontends, clients three to one, on workers that cannot take all: who was served, refused, or lost.",
        "bench:Overload",
    ),
    Command(
        "bench health",
        "",
        "Break one of four workers in every way, under load: what was found, how soon, and what it cost.\n\n"
        "Exits with 1 if anything was lost, missed or found that was not there. Canaries are sent more often than by "
        "default; every threshold is the default.",
        "bench:Health",
    ),
    Command(
        "bench degrade",
        "",
        "Stop workers until none is left, and let them go on, under load of all tiers: levels, batches, who was "
        "refused.\n\n"
        "Exits with 1 if levels, refusals or batches did not follow and return, premium was refused before level 4, or "
        "a noisy bound made levels flap. Times are shorter than the defaults; bounds and rules are not.",
        "bench:Degrade",
    ),
    Command(
        "bench engine",
        "",
        "How fast the torch engine decodes on this CPU, alone: --fast, --exact, and transformers beside them.",
        "bench:Engine",
    ),
)
