"""The `holdfast` command: how its words become a run, and what its help shows."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from holdfast import __version__
from holdfast.cli.arguments import with_values
from holdfast.cli.commands import COMMANDS, Command
from holdfast.cli.terminal import Terminal, write_out
from holdfast.core.errors import Refused, UserError
from holdfast.settings import Environment, read_environment
from holdfast.spec.arguments import HELP, HelpWanted, Options, UsageError, meant, options_of, parse

HELP_WIDTH = 80  # where there is no terminal to fit
ABOUT = "LLM serving whose streams survive dead and frozen engines: an OpenAI-compatible server on one machine."
END = "State (sockets, logs, records) is kept in $HOLDFAST_STATE_DIR, default ~/.holdfast."
NOBODY = {"HOME": "/"}  # the environment that help is shown for
# What people type who know kubectl, and what there is instead.
KUBECTL = {
    **dict.fromkeys(("create", "run"), "`holdfast up -f FILE` starts a manifest's deployment"),
    **dict.fromkeys(("edit", "patch", "replace", "set"), "change the manifest, and `holdfast apply -f` it"),
    "describe": "`holdfast get NAME -o yaml` shows all that is known, `holdfast rollout status` what it waits for",
    "logs": "`holdfast ps` shows processes; their logs are in $HOLDFAST_STATE_DIR/logs",
    "wait": "`holdfast rollout status` waits",
    "version": "`holdfast --version` shows it",
    "rollout restart": "change something of what should run, e.g. a variable, and `holdfast apply -f` it",
}
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
    if instead := KUBECTL.get(f"{group} {word}".strip()):
        raise UsageError(f"`{whole}` has no command {word}; {instead}")
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
        from holdfast.spec.option_checks import check_given

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
