"""Files of replicas that are gone."""

from __future__ import annotations

from pathlib import Path

from holdfast.supervise.leftovers import sweep

SET = "58acb458"


def made(state_dir: Path, serial: int, model: str = "chat", deployment: str = "local") -> list[str]:
    """All that a replica has on disk; the names of its processes."""
    replica = f"{deployment}-{model}-{SET}-{serial}"
    names = [f"{replica}-engine-0", f"{replica}-vault"]
    for path in (f"run/{replica}.lock", f"run/journals/{replica}/{names[0]}.journal"):
        (state_dir / path).parent.mkdir(parents=True, exist_ok=True)
        (state_dir / path).touch()
    for name in names:
        for suffix in (".log", ".log.1"):
            (state_dir / "logs").mkdir(exist_ok=True)
            (state_dir / "logs" / f"{name}{suffix}").touch()
    return names


def files(state_dir: Path) -> set[str]:
    return {str(path.relative_to(state_dir)) for path in state_dir.rglob("*") if path.is_file()}


def test_what_is_of_no_use_goes_and_the_last_logs_stay(tmp_path: Path) -> None:
    """Of who is gone; nothing of who is here, of another deployment, or of no replica; also with no directory."""
    sweep(tmp_path, "local", ())
    here = made(tmp_path, 2)
    others = [*made(tmp_path, 1, deployment="local2"), *made(tmp_path, 7, deployment="other")]
    for name in ("run/control-local.lock", "run/frontend.json", "logs/control.log", "logs/up.log"):
        (tmp_path / name).touch()
    stays = files(tmp_path)
    assert len(others) == 4
    for serial in (1, 3, 9, 10):
        made(tmp_path, serial)
    made(tmp_path, 1, model="tiny")
    sweep(tmp_path, "local", [*here, "control", "store"])
    names = [f"local-chat-{SET}-{serial}" for serial in (9, 10)] + [f"local-tiny-{SET}-1"]
    logs = {f"logs/{name}-{part}.log{more}" for name in names for part in ("engine-0", "vault") for more in ("", ".1")}
    assert files(tmp_path) == stays | logs
    assert not (tmp_path / "run" / "journals" / f"local-chat-{SET}-9").exists()
