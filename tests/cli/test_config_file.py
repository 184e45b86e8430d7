"""`holdfast up -c FILE`: every option can be in it, the command line wins, and nothing in it is ignored. Options that
would do nothing are refused, wherever they stand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import up as ups
from holdfast.cli.app import NOBODY, run
from holdfast.cli.arguments import kind_of, options_of
from holdfast.cli.config_file import read_config
from holdfast.cli.start import Up
from holdfast.core.errors import UserError
from holdfast.settings import read_environment
from holdfast.spec.deployment import DeploymentSpec
from holdfast.spec.settings import Setting

OPTIONS = options_of(Up.of(read_environment(NOBODY)), "up")


def toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')


def some(one: Setting) -> Any:
    """A value that the option takes, and no default."""
    if "choices" in one.extra:
        return one.extra["choices"][-1]
    kind = kind_of(one)
    if kind in (bool, int, float):
        return True if kind is bool else max(2, int(one.extra.get("min", 0)))
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


def test_every_option_can_be_in_a_file(tmp_path: Path) -> None:
    """By its long name without the dashes, in TOML's own types."""
    file = tmp_path / "up.toml"
    values = {flag.removeprefix("--"): some(one) for flag, one in OPTIONS.items() if flag != "--config"}
    file.write_text("".join(f"{word} = {toml(value)}\n" for word, value in values.items()))
    read = read_config(file, OPTIONS)
    assert set(read) == set(OPTIONS) - {"--config"}
    assert len(read) > 30
    assert (read["--port"], read["--kv-gib"], read["--torch-threads"], read["--api-key"]) == (2, 2, 2, ("x",))


def test_the_command_line_wins_over_the_file(asked: Any) -> None:
    """What both say is the command line's; what only the file says is the file's; the rest is as always."""
    text = 'engine = "sim"\nport = 9001\nworkers = 3\napi-key = ["a", "b"]\nstandby = "unmapped"\ndetach = true\n'
    spec, detach = asked(text, "--workers", "2")
    assert (spec.worker.engine, spec.port, spec.workers, spec.worker.place.standby) == ("sim", 9001, 2, "unmapped")
    assert (spec.frontend.api_keys, spec.frontends, detach) == (("a", "b"), 1, True)
    spec, _ = asked(text, "--api-key", "c", "--standby", "mapped")
    assert (spec.frontend.api_keys, spec.worker.place.standby) == (("c",), "mapped")
    spec, _ = asked("exact = true\nkv-gib = 1\n", "--fast", "--device", "cpu")
    assert (spec.worker.torch.exact, spec.worker.torch.kv_gib) == (False, 1.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kv-gibb = 1", "up.toml: kv-gibb: there is no such option of `holdfast up`; did you mean kv-gib?"),
        ("kv_gib = 1", "up.toml: kv_gib: .*did you mean kv-gib?"),
        ("zzzz = 1", "up.toml: zzzz: .*`holdfast up --help` lists them"),
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
        read_config(file, OPTIONS)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """As the person wrote it."""
    with pytest.raises(UserError, match=r"-c .*none\.toml cannot be read: No such file"):
        read_config(tmp_path / "none.toml", OPTIONS)


# -- options that would do nothing


def test_a_files_idle_options_are_refused_too(asked: Any) -> None:
    """Nobody is told on the command line only."""
    with pytest.raises(UserError, match="--kv-gib is for --engine torch and does nothing for sim"):
        asked('engine = "sim"\nkv-gib = 1\n')
