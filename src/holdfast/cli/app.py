"""Parses the arguments of the `holdfast` command and the file of `-c`, runs the command, and shows its help.

Always true: no line of help is wider than the terminal or `WIDTH_MAX`; on one page all descriptions begin in the same
column.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast import __version__
from holdfast.cli.arguments import with_values
from holdfast.cli.commands import COMMANDS, Command
from holdfast.cli.terminal import Terminal, write_out
from holdfast.core.errors import Refused, UserError
from holdfast.settings import Environment, read_environment
from holdfast.spec.arguments import (
    HELP,
    HELP_ALL,
    HelpWanted,
    Options,
    UsageError,
    kind_of,
    meant,
    options_of,
    parse,
    takes_many,
)
from holdfast.spec.settings import Setting

HELP_WIDTH = 80  # without a terminal
WIDTH_MIN, WIDTH_MAX = 40, 120
LEFT_MAX = 30  # width of the column of flags; after a longer flag the description begins on the next line
PANELS = (
    *("Arguments", "Options", "The fleet", "Scaling", "Serving", "Failover", "Health"),
    *("The torch and vllm engines", "The torch engine", "The vllm engine", "The sim engine"),
)
OWN_PANEL = "Options"
UNBROKEN = "\u00a0"  # no-break space
UNITS = {"s": "SECONDS", "ms": "MILLISECONDS"}
KINDS = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}
Entry = tuple[str, str]  # a flag or command, and its description
Panels = Mapping[str, Sequence[Entry]]
ABOUT = "LLM serving whose streams survive dead and frozen engines: an OpenAI-compatible server on one machine."
END = "State (sockets, logs, records) is kept in $HOLDFAST_STATE_DIR, default ~/.holdfast."
NO_ENVIRONMENT = {"HOME": "/"}  # environment for showing help
# Commands of kubectl that people try, and what to use instead.
KUBECTL = {
    "create": "`holdfast up -f FILE` starts a manifest's deployment",
    **dict.fromkeys(("edit", "patch", "replace", "set"), "change the manifest, and `holdfast apply -f` it"),
    "describe": "`holdfast get NAME -o yaml` shows all that is known, `holdfast rollout status` what it waits for",
    "logs": "`holdfast status` shows processes; their logs are in $HOLDFAST_STATE_DIR/logs",
    "wait": "`holdfast rollout status` waits",
    "version": "`holdfast --version` shows it",
    "rollout restart": "change something of what should run, e.g. a variable, and `holdfast apply -f` it",
}
BY_NAME = {name: command for command in COMMANDS for name in (command.words, *command.also)}
GROUPS = {name.rpartition(" ")[0] for name in BY_NAME}  # prefixes of command names


def run(words: Sequence[str]) -> int:
    """Run the command that the arguments name and return its exit status. Raise UserError if the arguments are invalid
    or the command fails."""
    if list(words[:1]) == ["--version"]:
        write_out(f"holdfast {__version__}\n")
        return 0
    name, command, rest = "", None, list(words)
    while rest and (longer := f"{name} {rest[0]}".strip()) in BY_NAME:
        name, command = longer, BY_NAME[longer]
        rest.pop(0)
    if command is not None and command.struct:
        return _run(command, name, rest)
    if rest and rest[0] not in HELP:
        raise _unknown(name, rest[0])
    show_group(name, everything=HELP_ALL in rest)
    return 0 if rest else 2


def _unknown(group: str, word: str) -> UsageError:
    """Return the error for a word that is no command of the group ("": of `holdfast` itself)."""
    whole = f"holdfast {group}".strip()
    what = "option" if word.startswith("-") else "command"
    known = [name.split()[-1] for name in BY_NAME if name.rpartition(" ")[0] == group]
    if instead := KUBECTL.get(f"{group} {word}".strip()):
        return UsageError(f"`{whole}` has no command {word}; {instead}")
    return UsageError(f"`{whole}` has no {what} {word}; {meant(word, known, f'`{whole} --help` lists them')}")


def _run(command: Command, name: str, words: Sequence[str]) -> int:
    """Run a command; `name`: as the user typed it."""
    kind = command.load()
    options = options_of(kind.of(read_environment(NO_ENVIRONMENT)), command.settings or command.words)
    try:
        said = parse(words, options, f"holdfast {name}")
    except HelpWanted as wanted:
        show_command(command, options, everything=wanted.everything)
        return 0
    if "--config" in said:
        from holdfast.cli.start import read_config

        said = read_config(said["--config"], options) | said
    if said:
        from holdfast.spec.option_checks import check_given

        check_given(options, said)
    env = environment(lasting=kind.lasting)
    return with_values(kind.of(env), options, said).run(env)


def environment(*, lasting: bool = False) -> Environment:
    """Return the settings from the environment. If a variable is invalid, raise Refused for `lasting` commands, else
    UserError."""
    try:
        return read_environment()
    except ValueError as error:
        raise (Refused if lasting else UserError)(str(error)) from error


# -- help


def show_group(group: str, *, everything: bool) -> None:
    """Show the commands of a group ("": of `holdfast` itself); `everything`: also expert commands and aliases."""
    panels: dict[str, list[Entry]] = {"Options": [("--help, -h", "Show this.")]}
    if not group:
        panels["Options"].insert(0, ("--version", "Show the version."))
    panels |= _commands_in(group, everything=everything)
    about, end = (BY_NAME[group].about, "") if group else (ABOUT, END)
    left_out = sum(command.expert for command in _within(group)) if not everything else 0
    if left_out:
        end = f"{end}\n{left_out} more commands: holdfast {group}".strip() + " --help-all"
    _show(f"{f'holdfast {group}'.strip()} COMMAND …", about, panels, end)


def _within(group: str) -> list[Command]:
    """Return the commands of a group, including those of a subgroup that is not itself listed ("node join")."""
    rows = {command.words for command in COMMANDS}
    return [one for one in COMMANDS if one.group == group or (not group and one.group not in rows)]


def _commands_in(group: str, *, everything: bool) -> dict[str, list[Entry]]:
    panels: dict[str, list[Entry]] = {}
    for command in _within(group):
        if everything or not command.expert:
            name = command.words.removeprefix(group).strip()
            also = f" Also: {', '.join(command.also)}." if everything and command.also else ""
            panels.setdefault(command.panel or "Commands", []).append((name, command.summary + also))
    renamed = [
        (name, command) for name, command in BY_NAME.items() if name.rpartition(" ")[0] == group != command.group
    ]
    if group and renamed:
        entries = [(name.split()[-1], f"Same as `holdfast {one.words}`.") for name, one in renamed]
        panels.setdefault("Commands", []).extend(entries)
    return panels


def show_command(command: Command, options: Options, *, everything: bool) -> None:

    name, settings = command.words, command.settings or command.words
    places = [one for one in options.values() if one.extra.get("positional")]
    named = " ".join(one.name.upper() if one.extra.get("required") else f"[{one.name.upper()}]" for one in places)
    panels = _commands_in(name, everything=everything) if name in GROUPS else {}
    panels |= panels_of(options, settings, everything=everything)
    left_out = 0 if everything else sum(one.is_expert(settings) for one in options.values())
    end = f"{left_out} more options: holdfast {name} --help-all" if left_out else ""
    _show(f"holdfast {name} [OPTIONS] {named}".rstrip(), command.about, panels, end)


def _show(usage: str, about: str, panels: Panels, end: str) -> None:

    terminal = Terminal()
    for line in page(usage, about, panels, end, shutil.get_terminal_size((HELP_WIDTH, 0)).columns):
        terminal.line(line, "bold" if line.endswith(":") and not line.startswith(" ") else "")


def page(usage: str, text: str, panels: Panels, end: str, width: int) -> list[str]:
    """Return the lines of a help page; titles end with a colon."""
    width = max(WIDTH_MIN, min(width, WIDTH_MAX))
    left = min(LEFT_MAX, max(len(what) for entries in panels.values() for what, _ in entries) + 4)
    lines = [f"Usage: {usage}", ""]
    for paragraph in text.split("\n\n"):
        lines += [*_paragraph(paragraph, width), ""]
    for title, entries in panels.items():
        lines += [f"{title}:", *(line for entry in entries for line in _entry(*entry, left, width)), ""]
    return [*lines, *(line for part in end.splitlines() for line in textwrap.wrap(part, width))]


def _paragraph(text: str, width: int) -> list[str]:
    """Return the lines of a paragraph; in a list, each entry has its own lines."""
    if not text.startswith("- "):
        return textwrap.wrap(text, width, break_on_hyphens=False)
    entries = (" ".join(line.split()) for line in text.removeprefix("- ").split("\n- "))
    return [
        line
        for one in entries
        for line in textwrap.wrap(one, width, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
    ]


def _entry(what: str, meaning: str, left: int, width: int) -> list[str]:
    wrapped = textwrap.wrap(meaning, width - left, break_on_hyphens=False) or [""]
    rows = [row.replace(UNBROKEN, " ") for row in wrapped]
    first = f"  {what}".ljust(left)
    if len(what) + 4 > left:
        return [first.rstrip(), *(" " * left + row for row in rows)]
    return [first + rows[0], *(" " * left + row for row in rows[1:])]


def panels_of(options: Options, command: str, *, everything: bool = True) -> dict[str, list[Entry]]:
    """Return arguments and options in the order of their definition. With `everything`, group them by panel; otherwise
    leave out the expert options and use one panel, which fits on a screen."""
    places = [(one.name, one.sentence) for one in options.values() if one.extra.get("positional")]
    panels: dict[str, list[Entry]] = {PANELS[0]: places} if places else {}
    panels[OWN_PANEL] = []
    for one in options.values():
        if not one.extra.get("positional") and (everything or not one.is_expert(command)):
            entry = _written(one), _meaning(one, with_bounds=everything)
            panel = one.extra.get("panel", OWN_PANEL) if everything else OWN_PANEL
            panels.setdefault(panel, []).append(entry)
    panels[OWN_PANEL].append(("--help, -h", "Show this."))
    return dict(sorted(panels.items(), key=lambda panel: PANELS.index(panel[0])))


def _written(one: Setting) -> str:
    if valued := one.extra.get("valued"):
        return f"{', '.join(valued)} {'|'.join(one.extra['values'])}"
    flags = ", ".join(filter(None, (*one.flag.split("/"), one.extra.get("short"))))
    if kind_of(one) is bool:
        return flags
    choices = "|".join(filter(None, one.extra.get("choices", ())))
    rest = ", -- TEXT …" if one.extra.get("rest") else ""
    return f"{flags} {choices or UNITS.get(one.unit) or one.unit.upper() or KINDS[kind_of(one)]}{rest}"


def _meaning(one: Setting, *, with_bounds: bool) -> str:
    least, most, over = (one.extra.get(key) if with_bounds else None for key in ("min", "max", "over"))
    bounds = f"{least:g} to {most:g}" if least is not None and most is not None else ""
    if not bounds and least:
        bounds = f"{least:g} or more"
    facts = [bounds or (f"over {over:g}" if over else ""), _default(one)]
    in_brackets = f"[{', '.join(filter(None, facts))}]".replace(" ", UNBROKEN)
    return f"{one.sentence} {in_brackets}" if any(facts) else one.sentence


def _default(one: Setting) -> str:
    value: Any = one.default
    if value in (None, "", ()) or takes_many(one) or "default" in one.sentence.lower():
        return ""
    if isinstance(value, bool) and "values" in one.extra:
        return f"default {next(text for text, meaning in one.extra['values'].items() if meaning is value)}"
    if isinstance(value, bool):
        on, _, off = one.flag.removeprefix("--").partition("/--")
        return f"default {on if value else off}" if off else ""
    return f"default {value:g}" if isinstance(value, float) else f"default {value}"
