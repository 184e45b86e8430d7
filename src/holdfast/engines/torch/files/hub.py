"""A model of the Hugging Face Hub by its id (`org/name`, or `org/name@revision`), fetched into the Hub's own cache.

`huggingface_hub` does it, in a separate process that can be ended (`hub_fetch`); the user's token, mirror
(`HF_ENDPOINT`), cache and proxies are used. Always true: a model that the engine cannot serve is refused by its
config.json, before its weights are fetched. If a connection brings no data, the fetch ends, and the error says how to
fetch by hand.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import TransientError, UserError

if TYPE_CHECKING:
    from holdfast.engines.torch.files.checkpoint import OnProgress

TICK_S = 0.5
# The library gives up on a silent connection after 10 s and tries a few times; two minutes without a byte are enough.
SILENT_TICKS_MAX = 240
LINE_BYTES_MAX = 65_536
_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")


def is_hub_id(text: str) -> bool:
    """Return True if it could be a Hub id; so could a relative path, which is looked for first."""
    return _ID.fullmatch(text) is not None


def by_hand(text: str) -> str:
    """Return how a person gets the model without us."""
    repo, _, revision = text.partition("@")
    at = f" --revision {revision}" if revision else ""
    return f"where there is a network: `hf download {repo}{at} --local-dir DIR`; then --model DIR"


def fetch_from_hub(
    text: str, progress: OnProgress, silent_ticks_max: int = SILENT_TICKS_MAX, *, any_family: bool = False
) -> Path:
    """Return the directory of a model's files, fetched if they are not there; `any_family`: also one that our own
    engine does not know. Blocks: not for an event loop.

    UserError for what cannot be had or served, TransientError for a network that did not bring it.
    """
    if importlib.util.find_spec("huggingface_hub") is None:
        mend = "to fetch it from the Hugging Face Hub: pip install 'holdfast-llm[hub]', and try again; or"
        raise UserError(f"--model {text}: there is no such path, {mend} {by_hand(text)}")
    found = _ID.fullmatch(text)
    assert found is not None
    progress("fetch", 0, None)
    report: dict[str, Any] = {}
    asked = [found["repo"], found["revision"] or "", *(["any"] if any_family else [])]
    for report in _reports(asked, silent_ticks_max):
        if "done" in report:
            progress("fetch", report["done"], report["total"])
    if "path" in report:
        return Path(report["path"])
    if report.get("refused"):
        raise UserError(f"--model {text}: {report['refused']}")
    why = report.get("failed") or "the process that fetched it ended without a word"
    raise TransientError(
        f"--model {text}: there is no such path, and fetching it from the Hub failed: {why}; {by_hand(text)}"
    )


def _reports(asked: list[str], silent_ticks_max: int) -> Iterator[dict[str, Any]]:
    """Yield what the fetching process reports, until it ends, or brings nothing for too long and is ended."""
    quiet = ["HF_HUB_DISABLE_PROGRESS_BARS=1", "HF_HUB_VERBOSITY=error"]
    command = [sys.executable, "-P", "-m", "holdfast.engines.torch.files.hub_fetch", str(os.getpid()), *asked]
    with subprocess.Popen(
        ["env", *quiet, *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        source, silent, most, rest = process.stdout.fileno(), 0, -1, b""
        try:
            while silent < silent_ticks_max:
                if not select.select([source], [], [], TICK_S)[0]:
                    silent += 1
                    continue
                piece = os.read(source, LINE_BYTES_MAX)
                if not piece:
                    return
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    with contextlib.suppress(ValueError):
                        report = json.loads(line)
                        silent = silent + 1 if report.get("done", most + 1) <= most else 0
                        most = max(most, report.get("done", 0))
                        yield report
        finally:
            process.kill()  # nothing, once it has ended
    yield {"failed": f"nothing came for {silent_ticks_max * TICK_S:.0f} s"}
