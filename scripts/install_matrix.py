"""`make prove-install`: a stranger's first `make up`, on machines of several kinds, each from a fresh clone.

    .venv/bin/python scripts/install_matrix.py [ROW …] [--out FILE]

A row is met if the first try serves the default model: `make up` ends well, a streamed answer comes whole, and
`holdfast down` leaves nothing. Needs the network that pip needs; what a row needs besides (root, debootstrap) is said
where it is missing. Commits count, the working tree does not.
"""

from __future__ import annotations

import argparse
import datetime
import http.client
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
UP_S = 1500.0  # gigabytes over a slow line
NOBODY = 65534
PLAIN = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin", "LANG": "C.UTF-8"}
# What a person's machine would have set too, where traffic is looked into or a wheel cache is near.
HANDED_ON = ("SSL_CERT_FILE", "PIP_CERT", "PIP_DEFAULT_TIMEOUT", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY")
Row = dict[str, Any]


class NotHereError(Exception):
    """What this machine lacks for a row."""


def clone(into: Path) -> Path:
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{ROOT}", str(into)], check=True)
    return into


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def try_it(run: Callable[..., subprocess.CompletedProcess[str]], venv: str, up: list[str], port: int) -> Row:
    """The first try, as `run` runs commands there."""
    began_s = time.monotonic()
    made = run(*up, timeout=UP_S)
    up_s = time.monotonic() - began_s
    words = (made.stdout + made.stderr).strip().splitlines()
    if made.returncode:
        return {"met": False, "up_s": round(up_s, 1), "said": words[-12:]}
    try:
        text, done = chat(port)
    finally:
        down = run(f"{venv}/bin/holdfast", "down", timeout=60.0)
    torch = run(f"{venv}/bin/python", "-c", "import torch; print(torch.__version__)", timeout=120.0)
    return {
        "met": done and bool(text) and "everything has stopped" in down.stdout,
        "up_s": round(up_s, 1),
        "torch": torch.stdout.strip(),
        "answer": text,
    }


def chat(port: int) -> tuple[str, bool]:
    """A streamed answer of the first model there, and whether it came whole."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", "/v1/models")
    model = json.loads(connection.getresponse().read())["data"][0]["id"]
    body = {"model": model, "stream": True, "max_tokens": 12, "messages": [{"role": "user", "content": "Say hello."}]}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    lines = connection.getresponse().read().decode().split("\n\n")
    connection.close()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    return text, "data: [DONE]" in lines


def runner(folder: Path, environ: dict[str, str], *before: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*command: str, timeout: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*before, *command], cwd=folder, env=environ, capture_output=True, text=True, timeout=timeout, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    return run


def size_gb(folder: Path) -> float:
    told = subprocess.run(["du", "-s", "-B", "1000000", str(folder)], capture_output=True, text=True, check=False)
    return round(int((told.stdout.split() or ["0"])[0]) / 1000, 2)


def make_up(port: int) -> list[str]:
    return ["make", "up", f"ARGS=--port {port} --detach"]


def as_here(folder: Path) -> Row:
    """With this machine's own settings of pip."""
    place, port = clone(folder / "clone"), free_port()
    environ = {**os.environ, "HOME": str(folder), "HOLDFAST_STATE_DIR": str(folder / "s")}
    row = try_it(runner(place, environ), ".venv", make_up(port), port)
    return row | {"venv_gb": size_gb(place / ".venv")}


def plain_pypi(folder: Path) -> Row:
    """No settings of pip, no wheels near, an empty cache: PyPI and nothing else."""
    place, port = clone(folder / "clone"), free_port()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIP_") or name in HANDED_ON}
    environ |= {"PIP_CONFIG_FILE": "/dev/null", "HOME": str(folder), "HOLDFAST_STATE_DIR": str(folder / "s")}
    row = try_it(runner(place, environ), ".venv", make_up(port), port)
    return row | {"venv_gb": size_gb(place / ".venv")}


def non_root(folder: Path) -> Row:
    """A user without rights, with the system's Python."""
    if os.getuid() != 0:
        raise NotHereError("to become another user one must be root")
    if subprocess.run(
        ["/usr/bin/python3", "-c", "import ensurepip, venv"], capture_output=True, check=False
    ).returncode:
        raise NotHereError("the system's python3 has no venv module: apt-get install python3-venv")
    place, port = clone(folder / "clone"), free_port()
    folder.chmod(0o755)
    subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", str(folder)], check=True)
    environ = PLAIN | {name: os.environ[name] for name in (*HANDED_ON, "PIP_FIND_LINKS") if name in os.environ}
    environ |= {"HOME": str(folder)}
    user = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--")
    row = try_it(runner(place, environ, *user), ".venv", make_up(port), port)
    return row | {"uid": NOBODY, "venv_gb": size_gb(place / ".venv")}


def clean_root(folder: Path) -> Row:
    """Debian with make, git and Python, and nothing else, in a root of its own."""
    if os.getuid() != 0 or shutil.which("debootstrap") is None:
        raise NotHereError("it takes root and debootstrap")
    mirror = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    root, needs = folder / "root", "make,python3,python3-venv,ca-certificates"
    made = subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={needs}", mirror[1].split("-")[0], str(root), mirror[0]],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode:
        raise NotHereError(f"debootstrap: {made.stdout.strip().splitlines()[-1]}")
    clone(root / "clone")
    for name in ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt"):
        shutil.copy(name, root / name[1:])
    port = free_port()
    environ = PLAIN | {name: os.environ[name] for name in HANDED_ON if name in os.environ}
    environ |= {"HOME": "/root"}
    inside = 'mount -t proc proc /proc && mount -t devtmpfs dev /dev 2>/dev/null; cd /clone && exec "$@"'
    words = ("unshare", "--mount", "chroot", str(root), "sh", "-c", inside, "sh")
    row = try_it(runner(folder, environ, *words), ".venv", make_up(port), port)
    return row | {"venv_gb": size_gb(root / "clone" / ".venv")}


def wheel(folder: Path) -> Row:
    """The built wheel with its torch extra, in an empty venv."""
    place, port = clone(folder / "clone"), free_port()
    environ = {**os.environ, "HOME": str(folder), "HOLDFAST_STATE_DIR": str(folder / "s")}
    run = runner(folder, environ)
    for command in (
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(place)],
        [sys.executable, "-m", "venv", str(folder / "venv")],
    ):
        run(*command, timeout=300.0).check_returncode()
    (built,) = folder.glob("holdfast_llm-*.whl")
    pins = str(place / "constraints.txt")
    up = f"venv/bin/pip install -q -c {pins} '{built}[torch]' && venv/bin/holdfast up --port {port} --detach"
    return try_it(run, str(folder / "venv"), ["sh", "-c", up], port) | {"venv_gb": size_gb(folder / "venv")}


ROWS = {"as-here": as_here, "plain-pypi": plain_pypi, "non-root": non_root, "clean-root": clean_root, "wheel": wheel}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"only these: {', '.join(ROWS)}")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "bench/results/install.json", help="where to write the results"
    )
    wishes = parser.parse_args()
    if unknown := [name for name in wishes.rows if name not in ROWS]:
        parser.error(f"unknown row {unknown[0]}; there are: {', '.join(ROWS)}")
    results: Row = json.loads(wishes.out.read_text())["rows"] if wishes.rows and wishes.out.exists() else {}
    for name in wishes.rows or ROWS:
        print(f"{name:12}", end=" ", flush=True)
        with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp", ignore_cleanup_errors=True) as made:
            try:
                results[name] = ROWS[name](Path(made))
            except NotHereError as error:
                results[name] = {"met": None, "not_tried": str(error)}
        print(json.dumps(results[name]), flush=True)
        write(wishes.out, results)
    return 0 if all(row["met"] is not False for row in results.values()) else 1


def write(path: Path, results: Row) -> None:
    about = {
        "command": "make prove-install",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
    }
    path.write_text(json.dumps({"about": about, "rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
