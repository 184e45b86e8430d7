"""From words to what a command was asked for: how options are read, what help shows, and what is loaded for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest

from holdfast.cli.app import COMMANDS, NOBODY
from holdfast.cli.arguments import Asked, HelpWanted, UsageError, options_of, parse, with_values
from holdfast.cli.help_text import page, panels_of
from holdfast.core.errors import Refused
from holdfast.settings import read_environment
from holdfast.spec.settings import about

# What no command that only looks has a use for; the parser that was here loaded pydantic.
HEAVY = {"torch", "numpy", "uvloop", "tokenizers", "jinja2", "aiohttp", "prometheus_client", "httptools", "pydantic"}
LOOKING = ("--version", "--help", "ps", "ps --json", "incidents", "memory status", "down", "up --help", "worker --help")


class Some(Asked, frozen=True):
    """A command with one option of each kind."""

    whom: Annotated[str, about("Whom.", positional=True)] = ""
    count: Annotated[int, about("How many.", min=0, max=9)] = 1
    share: Annotated[float | None, about("Which part.")] = None
    file: Annotated[Path | None, about("From where.", short="-f")] = None
    quiet: Annotated[bool, about("Without a word.", short="-q")] = False
    exact: Annotated[bool, about("Which arithmetic.", flag="--exact/--fast")] = True
    keys: Annotated[tuple[str, ...], about("Which.", flag="--key")] = ()


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
    ],
)
def test_words_are_read(words: str, read: dict[str, Any]) -> None:
    """As everywhere: the last of two wins, several are kept where several may be, a value may begin with a dash, and
    after -- there are no options."""
    assert with_values(Some(), OPTIONS, parse(words.split(), OPTIONS, "some")) == Some(**read)


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        ("--cuont 3", UsageError, "`some` has no option --cuont; did you mean --count?"),
        ("--zzz", UsageError, "`some` has no option --zzz; `some --help` lists them"),
        ("-x", UsageError, "`some` has no option -x; "),
        ("--coun 3", UsageError, "has no option --coun; did you mean --count?"),
        ("--count", UsageError, "--count needs a value"),
        ("--count x", UsageError, "--count must be a whole number, got 'x'"),
        ("--count 10", Refused, "--count must be 0 to 9, got 10"),
        ("--share nan", Refused, "--share must be a finite number, got nan"),
        ("--quiet=yes", UsageError, "--quiet takes no value"),
        ("you me", UsageError, "`some` takes no 'me'"),
    ],
)
def test_a_mistake_names_its_option(words: str, error: type[Exception], said: str) -> None:
    """By the name that was given, with what was meant where something is near."""
    with pytest.raises(error) as raised:
        parse(words.split(), OPTIONS, "some")
    assert str(raised.value).startswith(said) or said in str(raised.value)


def test_help_may_be_asked_for_anywhere() -> None:
    """After other options too, and in one word with them."""
    for words in (["-h"], ["--count", "3", "--help"], ["-qh"], ["-hq"]):
        with pytest.raises(HelpWanted):
            parse(words, OPTIONS, "some")


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.asked], ids=lambda one: one.words)
@pytest.mark.parametrize("width", [80, 120])
def test_help_fits_and_leaves_nothing_out(command: Any, width: int) -> None:
    """Every option of every command is on its page with its sentence, and no line is wider than the screen."""
    options = options_of(command.load().of(read_environment(NOBODY)), command.words)
    lines = page(command.words, command.about, panels_of(options), "", width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for one in options.values():
        assert (one.flag.partition("/")[0] in text or one.extra.get("positional")) != bool(one.extra.get("hidden"))
        assert one.extra.get("hidden") or one.sentence in text
        assert one.sentence, f"{one.flag} says nothing"


@pytest.mark.parametrize("words", LOOKING)
def test_who_only_looks_loads_what_looks(words: str, tmp_path: Path) -> None:
    """Neither a serving library nor an engine is loaded to answer; so a command answers at once."""
    end = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))"
    code = f"{end}; sys.argv[1:] = {words.split()!r}; from holdfast.cli.main import main; main()"
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HOLDFAST_STATE_DIR": str(tmp_path / "s")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert not HEAVY & set(done.stderr.split()), words


def test_processes_load_no_command_line() -> None:
    """What a supervisor starts is made from plain data: no part of `cli` is in it."""
    code = "import sys, holdfast.roles.run, holdfast.roles.background; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in loaded if name.startswith("holdfast.cli")] == []
