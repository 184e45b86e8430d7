"""`.ci/run` fails when any of its steps does, and leaves a slow suite out only if nothing it depends on has changed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Says what it was asked for; fails, or does not end, where a file of that name says so.
MAKE = """#!/bin/sh
for word in "$@"; do case $word in -*|*=*) ;; *) last=$word ;; esac; done
case "$*" in *--dry-run*) echo "would run $last"; exit ;; esac
echo "$last" >>../ran
if [ -e "../fail-$last" ]; then exit 3; fi
if [ -e "../hang-$last" ]; then exec sleep 60; fi
"""
STEPS = ["redis", "lint", "test", "test-all", "vllm", "test-vllm", "ray", "test-ray"]


class Tree:
    """A small repository with CI's own files in it, and a `make` that does what the test says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "tree"
        for name in ("src/holdfast/core/one.py", "src/holdfast/cli/chat/two.py", "src/holdfast/engines/vllm/three.py"):
            self.write(name, "first")
        shutil.copytree(ROOT / ".ci", self.root / ".ci", ignore=shutil.ignore_patterns("green", "__pycache__"))
        (folder / "bin").mkdir()
        (folder / "bin" / "make").write_text(MAKE)
        (folder / "bin" / "make").chmod(0o755)
        self.env = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
        for words in (["init", "-q"], ["add", "."], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m"]):
            subprocess.run(["git", *words], cwd=self.root, check=True)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(self, *words: str, **env: str) -> tuple[int, str, list[str]]:
        """Return CI's exit status, everything it printed, and the targets that were made."""
        ran = self.folder / "ran"
        ran.write_text("")
        done = subprocess.run(
            [str(self.root / ".ci" / "run"), *words],
            env=self.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout, ran.read_text().split()


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_everything_runs_once_and_then_only_what_changed(tree: Tree) -> None:
    """A green run records its suites; a file that only one of them depends on brings only that one back, and a file of
    neither brings none."""
    status, said, ran = tree.run()
    assert (status, ran) == (0, STEPS), said
    assert "make test-ray: passed" in said
    status, said, ran = tree.run()
    assert (status, ran) == (0, STEPS[:4]), said
    assert "make test-vllm: not run: nothing it depends on has changed since its last green run (" in said
    tree.write("src/holdfast/cli/chat/two.py", "second")
    assert tree.run()[2] == STEPS[:4]
    tree.write("src/holdfast/engines/vllm/three.py", "second")
    assert tree.run()[2] == STEPS[:6]
    tree.write("src/holdfast/core/new.py", "never added to git")
    assert tree.run("vllm", "ray")[2] == STEPS[4:]


@pytest.mark.parametrize("target", ["test-all", "vllm", "test-ray"])
def test_a_step_that_fails_fails_the_run_and_is_not_recorded(tree: Tree, target: str) -> None:
    """Whatever the step: packages that cannot be installed fail it too. The table is printed all the same."""
    (tree.folder / f"fail-{target}").touch()
    status, said, ran = tree.run()
    assert (status, ran) == (1, STEPS[: STEPS.index(target) + 1])
    assert f"CI: make {target}" in said
    assert "FAILED with status 3" in said
    green = {path.name for path in (tree.root / ".ci").glob("green/*")}
    assert green == ({"vllm"} if "ray" in target else set())


def test_a_step_that_runs_out_of_time_is_named(tree: Tree) -> None:
    """The run ends within its bound, as failed, and says which step was under way."""
    (tree.folder / "hang-vllm").touch()
    status, said, _ = tree.run("vllm", CI_WHOLE_S="2")
    assert status == 1
    assert "CI: make vllm (install packages) ran out of time" in said
    assert "make vllm (install packages): ran out of time" in said
