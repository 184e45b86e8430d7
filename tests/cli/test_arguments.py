"""From words to what a command was asked for: how options are read, what help shows, and what is loaded for it."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest

from holdfast.cli import up as ups
from holdfast.cli.app import BY_NAME, NO_ENVIRONMENT, run
from holdfast.cli.arguments import CommandOptions, with_values
from holdfast.cli.commands import COMMANDS, Command
from holdfast.cli.start import FrontendCommand, UpCommand, read_config
from holdfast.cli.top import StatusCommand
from holdfast.core.errors import Refused, UserError
from holdfast.settings import read_environment
from holdfast.spec.arguments import HelpWanted, UsageError, kind_of, options_of, parse
from holdfast.spec.deployment import DeploymentSpec
from holdfast.spec.settings import Setting, about

# What no command that only looks has a use for; the parser that was here loaded pydantic.
HEAVY = {"torch", "numpy", "uvloop", "tokenizers", "jinja2", "aiohttp", "prometheus_client", "httptools", "pydantic"}
LOOKING = (
    *("--help", "status", "get incidents", "get memory", "down", "up --help"),  # one of each module
    *("get", "diff -f /dev/null", "rollout status", "get models", "deploy --help-all"),
)


class Some(CommandOptions, frozen=True):
    """A command with one option of each kind."""

    whom: Annotated[str, about("Whom.", positional=True, kinds=("dog", "dogs"))] = ""
    count: Annotated[int, about("How many.", min=0, max=9)] = 1
    share: Annotated[float | None, about("Which part.")] = None
    file: Annotated[Path | None, about("From where.", short="-f")] = None
    quiet: Annotated[bool, about("Without a word.", short="-q")] = False
    exact: Annotated[bool, about("Which arithmetic.", flag="--exact/--fast")] = True
    keys: Annotated[tuple[str, ...], about("Which.", flag="--key")] = ()
    once: Annotated[str, about("Of one alone.", once=True)] = ""
    dry: Annotated[bool, about("Do nothing.", words={"client": True, "none": False})] = False


OPTIONS = options_of(Some(), "some")


@pytest.mark.parametrize(
    ("words", "read"),
    [
        ("--count 3", {"count": 3}),
        ("--count=3 --count 4", {"count": 4}),
        ("--share .5 you", {"share": 0.5, "whom": "you"}),
        ("-f a.toml -q", {"file": Path("a.toml"), "quiet": True}),
        ("-fa.toml", {"file": Path("a.toml")}),
        ("-qf a.toml", {"file": Path("a.toml"), "quiet": True}),
        ("--fast", {"exact": False}),
        ("--fast --exact", {"exact": True}),
        ("--key a --key=b --key -c", {"keys": ("a", "b", "-c")}),
        ("-- --count", {"whom": "--count"}),
        ("-", {"whom": "-"}),
        ("--quiet=true --dry=client", {"quiet": True, "dry": True}),
        ("--quiet --quiet=false --dry=none", {"quiet": False, "dry": False}),
        ("--exact=false", {"exact": False}),
        ("--fast=true", {"exact": False}),
        ("--fast=false", {"exact": True}),
        ("dogs", {}),
        ("dog rex", {"whom": "rex"}),
        ("Dog dog", {"whom": "dog"}),
    ],
)
def test_words_are_read(words: str, read: dict[str, Any]) -> None:
    """As everywhere: the last of two wins, several are kept where several may be, a value may begin with a dash, a
    switch may be told true or false, a kind may be said before a name, and after -- there are no options."""
    assert with_values(Some(), OPTIONS, parse(words.split(), OPTIONS, "some")) == Some(**read)


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        ("--cuont 3", UsageError, "`some` has no option --cuont; did you mean --count?"),
        ("--zzz", UsageError, "`some` has no option --zzz; `some --help-all` lists them"),
        ("-x", UsageError, "`some` has no option -x; "),
        ("--coun 3", UsageError, "has no option --coun; did you mean --count?"),
        ("--count", UsageError, "--count needs a value"),
        ("--count x", UsageError, "--count must be a whole number, got 'x'"),
        ("--count 10", Refused, "--count must be 0 to 9, got 10"),
        ("--share nan", Refused, "--share must be a finite number, got nan"),
        ("--once a --once b", UsageError, "--once is there twice, and `some` takes one"),
        ("--dry=server", UsageError, "--dry must be true or false or client or none, got 'server'"),
        ("dog rex dog", UsageError, "`some` takes no 'dog'"),
        ("--quiet=yes", UsageError, "--quiet must be true or false, got 'yes'"),
        ("you me", UsageError, "`some` takes no 'me'"),
    ],
)
def test_a_mistake_names_its_option(words: str, error: type[Exception], said: str) -> None:
    """By the name that was given, with what was meant where something is near."""
    with pytest.raises(error) as raised:
        parse(words.split(), OPTIONS, "some")
    assert str(raised.value).startswith(said) or said in str(raised.value)


class Wrapping(CommandOptions, frozen=True):
    """A command that hands words on to another program."""

    count: Annotated[int, about("How many.")] = 1
    words: Annotated[tuple[str, ...], about("Its words.", flag="--word", rest=True)] = ()


@pytest.mark.parametrize(
    ("words", "read"),
    [
        ("-- --count 3 --help x", {"words": ("--count", "3", "--help", "x")}),
        ("--count 2 --word -a -- -b -- c", {"count": 2, "words": ("-a", "-b", "--", "c")}),
        ("--", {}),
    ],
)
def test_what_follows_two_dashes_may_be_another_programs(words: str, read: dict[str, Any]) -> None:
    """As it was written, whatever it looks like: neither our options nor our help are in it."""
    options = options_of(Wrapping(), "wrapping")
    assert with_values(Wrapping(), options, parse(words.split(), options, "wrapping")) == Wrapping(**read)


def test_an_option_of_two_engines_is_heard_by_both() -> None:
    """It is written once, and the settings of each engine that reads it have it."""
    words = ["--engine", "vllm", "--kv-gib", "2", "--streams-max", "7", "--", "--enforce-eager"]
    worker = with_values(UpCommand(), UP_OPTIONS, parse(words, UP_OPTIONS, "up")).spec.worker  # type: ignore[attr-defined]
    assert (worker.vllm.kv_gib, worker.vllm.concurrency, worker.vllm.options) == (2.0, 7, ("--enforce-eager",))
    assert (worker.torch.kv_gib, worker.torch.concurrency) == (2.0, 7)
    assert worker.kv_gib == 2.0


def test_help_may_be_asked_for_anywhere() -> None:
    """After other options too, and in one word with them."""
    for words in (["-h"], ["--count", "3", "--help"], ["-qh"], ["-hq"]):
        with pytest.raises(HelpWanted):
            parse(words, OPTIONS, "some")


HelpLines = Callable[[str, int], list[str]]


@pytest.fixture
def help_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> HelpLines:
    """What a command with --help shows, on a screen of this width."""

    def lines(words: str, width: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        assert run(words.split()) == 0
        return capsys.readouterr().out.splitlines()

    return lines


NAMES = [name for one in COMMANDS for name in (one.words, *one.also)]
SCREEN = (100, 45)  # columns and lines that the short help of every command fits on


@pytest.mark.parametrize("name", ["", *NAMES])
def test_the_short_help_fits_on_a_screen(name: str, help_lines: HelpLines) -> None:
    """Under every name; its last line counts the options that only --help-all shows."""
    columns, rows = SCREEN
    lines = help_lines(f"{name} --help", columns)
    assert len(lines) <= rows
    assert max(map(len, lines)) <= columns
    command = BY_NAME.get(name)
    if command is None or not command.struct:
        return
    settings = command.settings or command.words
    options = options_of(command.load().of(read_environment(NO_ENVIRONMENT)), settings)
    experts = [one for one in options.values() if one.is_expert(settings)]
    assert bool(experts) == lines[-1].endswith(f"{len(experts)} more options: holdfast {command.words} --help-all")
    shown = {line.split()[0].rstrip(",") for line in lines if line.startswith("  -")}
    for one in options.values():
        assert (one in experts) != (one.extra.get("positional", False) or flag_shown(one) in shown), one.flag


def flag_shown(one: Setting) -> str:
    """The first flag of an option as help shows it."""
    return str(one.extra["valued"][0]) if "valued" in one.extra else one.flag.partition("/")[0]


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.struct], ids=lambda one: one.words)
@pytest.mark.parametrize("width", [80, 120])
def test_help_all_fits_and_leaves_nothing_out(command: Command, width: int, help_lines: HelpLines) -> None:
    """Every option of every command is on its page with its sentence, and no line is wider than the screen."""
    settings = command.settings or command.words
    options = options_of(command.load().of(read_environment(NO_ENVIRONMENT)), settings)
    lines = help_lines(f"{command.words} --help-all", width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for one in options.values():
        assert flag_shown(one) in text or one.extra.get("positional")
        assert one.sentence in text
        assert one.sentence, f"{one.flag} says nothing"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: one.words)
def test_help_names_every_command(command: Command, help_lines: HelpLines) -> None:
    """In the help of its group, or of `holdfast` where that has no row; an expert's in --help-all only."""
    group = command.group if command.group in {one.words for one in COMMANDS} else ""
    name = command.words.removeprefix(group).strip()
    for option in ("--help", "--help-all"):
        listed = [line for line in help_lines(f"{group} {option}", 100) if re.match(f"  {name}(  |$)", line)]
        assert bool(listed) == (option == "--help-all" or not command.expert)


def test_help_all_has_other_names(help_lines: HelpLines) -> None:
    """Those that a command had before, and which command a name stands for now."""
    assert " Also: ps." in "\n".join(help_lines("--help-all", 100))
    assert "Same as `holdfast run lock`" in "\n".join(help_lines("lock --help", 100))
    assert help_lines("--version", 100) == ["holdfast 0.1.0"]


def test_a_name_means_one_command() -> None:
    """No name is given twice, and every group has a row or is named by its commands in full."""
    assert len(NAMES) == len(set(NAMES)) == len(BY_NAME)


@pytest.mark.parametrize(
    ("words", "json"), [("-o json", True), ("--output=json", True), ("-ojson", True), ("-o table", False), ("", False)]
)
def test_an_output_format_is_the_json_switch(words: str, json: bool) -> None:
    """`-o json` means `--json`."""
    options = options_of(StatusCommand(), "status")
    assert with_values(StatusCommand(), options, parse(words.split(), options, "status")) == StatusCommand(json=json)
    with pytest.raises(UsageError, match="-o must be table or json, got 'xml'"):
        parse(["-o", "xml"], options, "status")


@pytest.mark.parametrize("words", LOOKING)
def test_who_only_looks_loads_what_looks(words: str, tmp_path: Path) -> None:
    """Neither a serving library nor an engine is loaded to answer; so a command answers at once."""
    end = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))"
    code = f"{end}; sys.argv[1:] = {words.split()!r}; from holdfast.cli.main import main; main()"
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HOLDFAST_STATE_DIR": str(tmp_path / "s")}
    how = {"env": env, "capture_output": True, "text": True, "timeout": 60, "check": False}
    done = subprocess.run([sys.executable, "-c", code], **how)
    assert "Traceback" not in done.stderr, done.stderr
    assert not HEAVY & set(done.stderr.split()), words


def test_processes_load_no_command_line() -> None:
    """What a supervisor starts is made from plain data: no part of `cli` is in it."""
    code = "import sys, holdfast.roles.run, holdfast.roles.background; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in loaded if name.startswith("holdfast.cli")] == []


# -- `holdfast up -c FILE`: every option can be in it, and nothing in it is ignored

UP_OPTIONS = options_of(UpCommand.of(read_environment(NO_ENVIRONMENT)), "up")


def toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')


def some(one: Setting) -> Any:
    """A value that the option takes, and no default."""
    if "choices" in one.extra:
        return one.extra["choices"][-1]
    kind = kind_of(one)
    if kind in (bool, int, float):
        most = one.extra.get("max") or math.inf
        return True if kind is bool else min(max(2, int(one.extra.get("min", 0))), most)
    if one.name == "spares":
        return "1"
    return "/tmp/x" if kind is Path else "x"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """What `up` was asked for by words and a file's text; nothing is started."""
    monkeypatch.setenv("HOLDFAST_STATE_DIR", str(tmp_path / "s"))
    monkeypatch.delenv("HOLDFAST_API_KEYS", raising=False)
    seen: list[tuple[DeploymentSpec, bool]] = []
    monkeypatch.setattr(ups, "run_up", lambda _, spec, detach, tied: seen.append((spec, detach)) or 0)
    file = tmp_path / "up.toml"

    def ask(text: str, *words: str) -> tuple[DeploymentSpec, bool]:
        file.write_text(text)
        assert run(["up", "-c", str(file), *words]) == 0
        return seen[-1]

    return ask


def test_a_frontends_options_are_its_own() -> None:
    """It is described by a whole deployment, in which others have a store and a name too."""
    options = options_of(FrontendCommand.of(read_environment(NO_ENVIRONMENT)), "frontend")
    assert {one.path[1] for one in options.values() if len(one.path) > 2} == {"frontend"}


def test_every_option_can_be_in_a_file(tmp_path: Path) -> None:
    """By its long name without the dashes, in TOML's own types."""
    file = tmp_path / "up.toml"
    values = {flag.removeprefix("--"): some(one) for flag, one in UP_OPTIONS.items() if flag != "--config"}
    file.write_text("".join(f"{word} = {toml(value)}\n" for word, value in values.items()))
    read = read_config(file, UP_OPTIONS)
    assert set(read) == set(UP_OPTIONS) - {"--config"}
    assert len(read) > 30
    assert (read["--port"], read["--kv-gib"], read["--torch-threads"], read["--api-key"]) == (2, 2, 2, ("x",))


def test_the_command_line_wins_over_the_file(asked: Any) -> None:
    """What both say is the command line's; what only the file says is the file's; the rest is as always."""
    text = 'engine = "sim"\nport = 9001\nworkers = 3\napi-key = ["a", "b"]\nstandby = "unmapped"\ndetach = true\n'
    spec, detach = asked(text, "--workers", "2")
    assert (spec.worker.engine, spec.port, spec.workers, spec.worker.failover.standby) == ("sim", 9001, 2, "unmapped")
    assert (spec.frontend.api_keys, spec.frontends, detach) == (("a", "b"), 1, True)
    spec, _ = asked(text, "--api-key", "c", "--standby", "mapped")
    assert (spec.frontend.api_keys, spec.worker.failover.standby) == (("c",), "mapped")
    spec, _ = asked("exact = true\nkv-gib = 1\n", "--fast", "--device", "cpu")
    assert (spec.worker.torch.exact, spec.worker.torch.kv_gib) == (False, 1.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kv-gibb = 1", "up.toml: kv-gibb: there is no such option of `holdfast up`; did you mean kv-gib?"),
        ("kv_gib = 1", "up.toml: kv_gib: .*did you mean kv-gib?"),
        ("zzzz = 1", "up.toml: zzzz: .*`holdfast up --help-all` lists them"),
        ('config = "x"', "up.toml: config: there is no such option"),
        ("[torch]\nkv-gib = 1", "up.toml: torch.kv-gib: there are no tables; did you mean kv-gib?"),
        ('port = "8000"', "up.toml: port must be a whole number, got '8000'"),
        ("port = 70000", "up.toml: port must be 0 to 65535, got 70000"),
        ("drain-s = -1", "up.toml: drain-s must be 0 or more, got -1"),
        ("standbys = true", "up.toml: standbys must be a whole number, got True"),
        ("exact = 1", "up.toml: exact must be true or false, got 1"),
        ('standby = "asleep"', "up.toml: standby must be one of mapped, unmapped, got 'asleep'"),
        (f"kv-gib = 1{'0' * 400}", "up.toml: kv-gib must be a finite number"),
        ("api-key = [1]", "up.toml: api-key must be a string, or a list of them, got 1"),
        ("port = ", "up.toml is not TOML: "),
        ("model = '\udcff'", "up.toml is not TOML: "),
    ],
)
def test_what_a_file_cannot_say_is_refused_by_its_path(text: str, words: str, tmp_path: Path) -> None:
    """With the file, the key's path and, where one is near, the name that was meant."""
    file = tmp_path / "up.toml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=words.replace("?", r"\?")):
        read_config(file, UP_OPTIONS)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """As the person wrote it."""
    with pytest.raises(UserError, match=r"-c .*none\.toml cannot be read: No such file"):
        read_config(tmp_path / "none.toml", UP_OPTIONS)


# -- options that would do nothing


def test_a_files_idle_options_are_refused_too(asked: Any) -> None:
    """Nobody is told on the command line only."""
    with pytest.raises(UserError, match="--kv-gib is for --engine torch or vllm and does nothing for sim"):
        asked('engine = "sim"\nkv-gib = 1\n')
