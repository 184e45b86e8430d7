"""What `deploy/` hands out fits the command it starts, and keeps what failover needs."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from holdfast.cli.app import NO_ENVIRONMENT
from holdfast.cli.start import UpCommand
from holdfast.settings import read_environment
from holdfast.spec.arguments import options_of

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def options_of_up() -> set[str]:
    options = options_of(UpCommand.of(read_environment(NO_ENVIRONMENT)), "up").values()
    return {text for one in options for text in (*one.flag.split("/"), one.extra.get("short", ""))}


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "holdfast.service")
    return parser


def test_under_systemd_engines_outlive_their_supervisor() -> None:
    """Nothing in the unit ends the engines when only the supervisor has died: systemd ends the main process alone, runs
    no stop command after a crash, and does not stop the service because one process ran out of memory."""
    service = unit()["Service"]
    assert service["KillMode"] == "process"
    assert service["OOMPolicy"] == "continue"
    assert service["Restart"] == "always"
    assert "ExecStop" not in service
    assert "--untied" in shlex.split(service["ExecStart"])


def test_started_commands_are_accepted() -> None:
    """The unit's and the image's command name options that `holdfast up` has."""
    image = re.search(r"^ENTRYPOINT (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert image is not None
    words = [*shlex.split(unit()["Service"]["ExecStart"]), *yaml.safe_load(image[1])[2:]]
    named = {word for word in words if word.startswith("-")}
    assert named <= options_of_up()


def test_nothing_is_open_to_other_machines_without_a_key() -> None:
    """Who deploys these files as they are serves this machine alone."""
    assert '\nhost = "127.0.0.1"' in (DEPLOY / "holdfast.toml").read_text()
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert {port for one in compose["services"].values() for port in one["ports"]} == {"127.0.0.1:8000:8000"}


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """systemd's own check finds nothing to say about the unit."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    path = tmp_path / "holdfast.service"
    text = (DEPLOY / "holdfast.service").read_text().replace("/opt/holdfast/bin/holdfast", "/bin/true")
    path.write_text(text.replace("User=holdfast", "User=daemon"))
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=60)
    assert "holdfast.service" not in done.stderr, done.stderr


def test_the_image_is_built_from_files_that_are_there() -> None:
    """What the Dockerfile copies and compose names exists."""
    for source in re.findall(r"^COPY (?!--from)(\S+) ", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE):
        assert (ROOT / source).exists(), source
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for service in compose["services"].values():
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
