"""The `holdfast` command: every subcommand as one row of a table, and how its words become a run.

A row names a struct by its module; only the one that was asked for is imported, and with it the rooms that it needs. So
`holdfast ps` loads what looks, and nothing that serves.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast import __version__
from holdfast.cli.arguments import HELP, Asked, HelpWanted, Options, UsageError, meant, options_of, parse, with_values
from holdfast.cli.terminal import Terminal, write_out
from holdfast.core.errors import Refused, UserError
from holdfast.settings import Environment, read_environment

HELP_WIDTH = 80  # where there is no terminal to fit
RUN = "Run it"
PARTS = "Run one process by hand"
BREAK = "Break it and measure it"
ABOUT = "LLM serving whose streams survive dead and frozen engines: an OpenAI-compatible server on one machine."
END = "State (sockets, logs, records) is kept in $HOLDFAST_STATE_DIR, default ~/.holdfast."
FAULTS = """\
Break a worker on purpose (start it with --allow-chaos).

Faults:

- crash – the process kills itself (SIGKILL)
- stop – the process stops itself (SIGSTOP)
- wedge – the process lives, its engine makes no step any more
- slow – everything takes --factor times as long
- wrong-tokens – every token is another word than it should be
- drift-logprobs – every logprob is lower --by this
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
        "By default a real model, SmolLM2-135M-Instruct; `--engine sim` is a simulator that says random words.",
        "start:Up",
    ),
    Command("down", RUN, "Stop everything, whether or not its supervisor lives.", "down:Down"),
    Command("ps", RUN, "Show what runs.", "ps:Ps"),
    Command("top", RUN, "Watch it live: workers, their standing and pace, levels, the last incidents.", "top:Top"),
    Command("incidents", RUN, "Show what died, why, who went on, and the gap that streams saw.", "ps:Incidents"),
    Command(
        "chat",
        RUN,
        "Talk to it. A mark in the margin shows where an engine died and its standby went on.",
        "chat.talk:Chat",
    ),
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
    Command("memory", PARTS, "Memory that outlives processes: serve it, look at it."),
    Command(
        "memory serve",
        "",
        "Keep the memory of devices: a vault and its keeper for each, in the foreground. Ctrl-C ends them.\n\n"
        "Ending them lets go of the memory; killing them does not.",
        "memory:Serve",
    ),
    Command("memory status", "", "Show the vaults of this machine, and what they keep.", "memory:Show"),
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
NOBODY = {"HOME": "/"}  # the environment that help is shown for
BY_WORDS = {command.words: command for command in COMMANDS}


def run(words: Sequence[str]) -> int:
    """Do what the words say; the exit status. UserError says what is wrong with them, or with what they ask for."""
    if list(words[:1]) == ["--version"]:
        write_out(f"holdfast {__version__}\n")
        return 0
    group, rest = "", list(words)
    while True:
        if not rest or rest[0] in HELP:
            show_group(group)
            return 0 if rest else 2
        command = _named(group, rest.pop(0))
        if command.asked:
            return _run(command, rest)
        group = command.words


def _named(group: str, word: str) -> Command:
    """The command of a group ("": of `holdfast` itself) that is called so."""
    if found := BY_WORDS.get(f"{group} {word}".strip()):
        return found
    whole = f"holdfast {group}".strip()
    what = "option" if word.startswith("-") else "command"
    known = [command.words.split()[-1] for command in _within(group)]
    raise UsageError(f"`{whole}` has no {what} {word}; {meant(word, known, f'`{whole} --help` lists them')}")


def _within(group: str) -> list[Command]:
    return [command for command in COMMANDS if command.words.rpartition(" ")[0] == group]


def _run(command: Command, words: Sequence[str]) -> int:
    kind = command.load()
    options = options_of(kind.of(read_environment(NOBODY)), command.words)
    try:
        said = parse(words, options, f"holdfast {command.words}")
    except HelpWanted:
        show_command(command, options)
        return 0
    if "--config" in said:
        from holdfast.cli.config_file import read_config

        said = read_config(said["--config"], options) | said
    if said:
        from holdfast.cli.option_checks import check_given

        check_given(options, said)
    env = environment(lasting=kind.lasting)
    return with_values(kind.of(env), options, said).run(env)


def environment(*, lasting: bool = False) -> Environment:
    """What the environment says; a wrong variable is the person's to mend."""
    try:
        return read_environment()
    except ValueError as error:
        raise (Refused if lasting else UserError)(str(error)) from error


# -- help


def show_group(group: str) -> None:
    panels: dict[str, list[tuple[str, str]]] = {"Options": [("--help, -h", "Show this.")]}
    if not group:
        panels["Options"].insert(0, ("--version", "Show the version."))
    for command in _within(group):
        panels.setdefault(command.panel or "Commands", []).append((command.words.split()[-1], command.summary))
    about, end = (BY_WORDS[group].about, "") if group else (ABOUT, END)
    _show(f"{f'holdfast {group}'.strip()} COMMAND …", about, panels, end)


def show_command(command: Command, options: Options) -> None:
    from holdfast.cli.help_text import panels_of

    places = [one for one in options.values() if one.extra.get("positional")]
    named = " ".join(one.name.upper() if one.extra.get("required") else f"[{one.name.upper()}]" for one in places)
    _show(f"holdfast {command.words} [OPTIONS] {named}".rstrip(), command.about, panels_of(options), "")


def _show(usage: str, about: str, panels: dict[str, list[tuple[str, str]]], end: str) -> None:
    from holdfast.cli.help_text import page

    terminal = Terminal()
    for line in page(usage, about, panels, end, shutil.get_terminal_size((HELP_WIDTH, 0)).columns):
        terminal.line(line, "bold" if line.endswith(":") and not line.startswith(" ") else "")
