"""Decide whether a slow suite has to run: only if something it depends on has changed since its last green run.

    python3 .ci/suites.py fingerprint vllm|ray        print the hash of everything the suite depends on
    python3 .ci/suites.py unchanged vllm|ray          exit 0, and say so, if that is the hash of its last green run
    python3 .ci/suites.py record vllm|ray HASH        write .ci/green/NAME after a green run that began with this hash

What a suite depends on is listed here and nowhere else. Files are hashed as they lie in the working tree, new ones that
git does not ignore included, and with them the commands that `make` would install and test with. `.ci/run` records; a
person commits the record.
"""

from __future__ import annotations

import datetime
import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("pyproject.toml", "constraints.txt", "scripts/install.py", "scripts/torch_choice.py")
# All of `src` but what no process of the suite imports: a new folder counts until it is left out here.
# The longest path that a file lies under decides; "!" leaves out.
DEPENDS = {
    "vllm": (
        *PACKAGES,
        "scripts/install_vllm.py",
        "src/holdfast",
        "!src/holdfast/cli/chat",
        "!src/holdfast/engines/torch",
        # Checkpoints are read, and samples compared, by the torch engine's own modules.
        "src/holdfast/engines/torch/__init__.py",
        "src/holdfast/engines/torch/files",
        "src/holdfast/engines/torch/model",
        "src/holdfast/engines/torch/sampling.py",
        "!src/holdfast/roles/engine_torch.py",
        "conftest.py",
        "tests/engines/conftest.py",
        "tests/engines/stock_vllm",
        "tests/engines/test_engine_contract.py",
        "tests/rigs/__init__.py",
        "tests/rigs/agents.py",
        "tests/rigs/engines/__init__.py",
        "tests/rigs/engines/any_engine.py",
        "tests/rigs/engines/engine_agent.py",
        "tests/rigs/engines/vllm_blocks.py",
        "tests/rigs/engines/vllm_core.py",
        "tests/rigs/engines/vllm_models.py",
        "tests/rigs/engines/vllm_schedulers.py",
        "tests/rigs/engines/vllm_small_scheduler.py",
        "tests/rigs/small_model.py",
        "docs/examples",
    ),
    "ray": (
        *PACKAGES,
        "src/holdfast",
        "!src/holdfast/cli/chat",
        "!src/holdfast/engines/vllm",
        # A model's files are examined, and its memory planned, before its engine is known.
        "src/holdfast/engines/vllm/__init__.py",
        "src/holdfast/engines/vllm/files.py",
        "src/holdfast/engines/vllm/memory_plan.py",
        "src/holdfast/engines/vllm/reserved_options.py",
        "!src/holdfast/roles/engine_vllm.py",
        "conftest.py",
        "tests/rigs/__init__.py",
        "tests/rigs/fleet/__init__.py",
        "tests/rigs/fleet/fleet_rig.py",
        "tests/rigs/roles/__init__.py",
        "tests/rigs/roles/ray_cluster.py",
        "tests/rigs/two_machines.py",
        "tests/roles/on_ray",
        "examples",
    ),
}


def counts(name: str, depends: tuple[str, ...]) -> bool:
    """Return whether a file is one that a suite depends on."""
    over = [path for path in depends if f"{name}/".startswith(f"{path.removeprefix('!')}/")]
    return bool(over) and not max(over, key=lambda path: len(path.removeprefix("!"))).startswith("!")


def output_of(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def files_of(suite: str) -> list[str]:
    """Return the names of the files that a suite depends on, as they are in the working tree now."""
    listed = output_of("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return sorted({name for name in listed if counts(name, DEPENDS[suite]) and (ROOT / name).is_file()})


def commands_of(suite: str) -> str:
    """Return what `make` would run to install and to test, without the seed and the Python of one run."""
    words = ("--dry-run", "--always-make", "--no-print-directory", f"test-{suite}", "SEED=0", "PYTHON=python3")
    return output_of("make", *words)


def fingerprint(suite: str) -> str:
    """Return the hash of everything that a suite depends on."""
    lines = [f"{name} {hashlib.sha256((ROOT / name).read_bytes()).hexdigest()}" for name in files_of(suite)]
    return hashlib.sha256("\n".join([*lines, commands_of(suite)]).encode()).hexdigest()


def record_of(suite: str) -> Path:
    return ROOT / ".ci" / "green" / suite


def unchanged(suite: str) -> bool:
    """Return whether the suite's last green run was with what is here now; if so, print when that was."""
    path = record_of(suite)
    words = path.read_text().split() if path.exists() else []
    if len(words) != 3 or words[0] != fingerprint(suite):
        return False
    since = f"({words[1]}, {words[2]})"
    print(f"make test-{suite}: not run: nothing it depends on has changed since its last green run {since}")
    return True


def record(suite: str, began_with: str) -> None:
    """Write that the suite is green with what is here now; refuse if that has changed while it ran."""
    if fingerprint(suite) != began_with:
        raise SystemExit(f"make test-{suite}: passed, but its files changed meanwhile: not recorded as green")
    path, commit = record_of(suite), output_of("git", "rev-parse", "--short", "HEAD").strip()
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{began_with} {datetime.datetime.now(datetime.UTC).date()} {commit}\n")
    print(f"make test-{suite}: green; commit {path.relative_to(ROOT)} to leave it out while nothing of it changes")


def main() -> None:
    match sys.argv[1:]:
        case ["fingerprint", suite] if suite in DEPENDS:
            print(fingerprint(suite))
        case ["unchanged", suite] if suite in DEPENDS:
            sys.exit(0 if unchanged(suite) else 1)
        case ["record", suite, began_with] if suite in DEPENDS:
            record(suite, began_with)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
