"""What a setting says of itself is what holds for it: bounds, options, and options that would do nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.core.errors import UserError
from holdfast.spec.deployment import DeploymentSpec
from holdfast.spec.engines import ENGINES, FailoverSettings, SimSettings, refuse_idle
from holdfast.spec.health import SpareSettings
from holdfast.spec.launch import ControlLaunch, FrontendLaunch, WorkerLaunch
from holdfast.spec.settings import Setting, all_settings, filled

CONFIGURATION = Path(__file__).parents[2] / "docs" / "configuration.md"
COMMANDS = ("up", "worker", "frontend", "control")
PATTERNS = (DeploymentSpec("local"), WorkerLaunch(), FrontendLaunch(), ControlLaunch())
SETTINGS = [setting for pattern in PATTERNS for setting in all_settings(pattern)]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: ".".join(setting.path))
def test_a_setting_has_a_sentence_and_its_default_is_right(setting: Setting) -> None:
    """Whoever meets it in a help text, in the docs or in a refusal can read what it is for."""
    assert setting.sentence.strip().endswith((".", "…", "404.", "tiny", "name."))
    assert setting.wrong(setting.default) == ""
    assert (setting.name.endswith("_s") and not setting.name.endswith("_per_s")) == (setting.unit == "s")


def test_flags_are_one_setting_each() -> None:
    """No command has two settings under one name."""
    for command, pattern in zip(COMMANDS, PATTERNS, strict=True):
        offered = [setting.flag for setting in all_settings(pattern) if command in setting.commands]
        assert len(offered) == len(set(offered))


@pytest.mark.parametrize(
    ("kind", "field", "value", "words"),
    [
        (FailoverSettings, "wake_s", 0.0, "wake_s must be over 0, got 0"),
        (FailoverSettings, "standby", "asleep", "standby must be one of mapped, unmapped, got 'asleep'"),
        (SimSettings, "jitter", 1.5, "jitter must be 0 to 0.99, got 1.5"),
        (SimSettings, "queue", -1, "queue must be 0 or more, got -1"),
        (SpareSettings, "spares", "51%", "spares must be a number, or a share up to 50%, got '51%'"),
        (FrontendLaunch, "drain_s", float("inf"), "drain_s must be a finite number, got inf"),
    ],
)
def test_a_value_out_of_bounds_is_in_no_struct(kind: Any, field: str, value: Any, words: str) -> None:
    """However it was made: by hand, by replacing, or out of JSON."""
    with pytest.raises(ValueError, match=words):
        kind(**{field: value})
    with pytest.raises(ValueError, match=words):
        msgspec.structs.replace(kind(), **{field: value})
    if value != float("inf"):  # JSON has none
        with pytest.raises(msgspec.ValidationError, match=words):
            msgspec.json.decode(msgspec.json.encode({field: value}), type=kind)


def test_values_go_where_they_belong() -> None:
    """`filled` reaches settings inside of settings, leaves the rest, and names the option of a wrong one."""
    spec = filled(DeploymentSpec("d"), {("workers",): 2, ("worker", "sim", "ttft_ms"): 1.0, ("worker", "drain_s"): 2.0})
    assert (spec.workers, spec.worker.sim.ttft_ms, spec.worker.drain_s) == (2, 1.0, 2.0)
    assert spec.worker.sim.tpot_ms == SimSettings().tpot_ms
    for path, value, words in (
        (("worker", "torch", "ranks"), 17, "--ranks must be 1 to 16, got 17"),
        (("worker", "sim", "ranks"), 0, "--sim-ranks must be 1 to 64, got 0"),
        (("wait_s",), float("nan"), "--wait-s must be a finite number"),
    ):
        with pytest.raises(UserError, match=words):
            filled(DeploymentSpec("d"), {path: value})


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: ".".join(setting.path))
def test_what_would_do_nothing_is_refused_by_name(setting: Setting) -> None:
    """For every setting: the engine it is not for refuses it, the engine it is for takes it."""
    flag = setting.flag.partition("/")[0]
    for engine in ENGINES:
        if engine not in setting.extra.get("engines", ENGINES):
            with pytest.raises(UserError, match=f"{flag} .*is for --engine .* does nothing for {engine}"):
                refuse_idle(engine, 1, [setting])
        else:
            refuse_idle(engine, 1, [setting])
    if setting.extra.get("with_standbys"):
        with pytest.raises(UserError, match=f"{flag} does nothing without standbys"):
            refuse_idle(setting.extra.get("engines", ENGINES)[0], 0, [setting])


def line(setting: Setting) -> str:
    """A setting's line in docs/configuration.md."""
    default = setting.default
    if isinstance(default, bool):
        shown = "on" if default else "off"
    elif isinstance(default, int | float):
        shown = f"{default:.9g} {setting.unit}".strip()
    else:
        shown = str(default) if default else ""
    return f"| `{setting.flag}` | {', '.join(setting.commands)} | {shown} | {setting.sentence} |"


def test_the_docs_list_every_option_as_it_is() -> None:
    """docs/configuration.md has each option's commands, default and sentence, and no option that is not there."""
    offered = {
        line(setting)
        for command, pattern in zip(COMMANDS, PATTERNS, strict=True)
        for setting in all_settings(pattern)
        if setting.commands and command == setting.commands[0]
    }
    listed = {found for found in CONFIGURATION.read_text().splitlines() if found.startswith("| `--")}
    assert listed == offered, "\n".join(sorted(offered - listed))
