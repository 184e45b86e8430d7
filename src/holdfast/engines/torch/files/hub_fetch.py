"""The process that fetches a model from the Hub: `python -m …files.hub_fetch PARENT ORG/NAME REVISION [any]`.

It writes one JSON object per line to standard output: how many bytes are there, and at the end where the model is, or
why the fetch failed (`refused`: a retry does not help; `failed`: it may). `any`: accept families that the torch engine
does not know. It dies with the process that started it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from holdfast.core.errors import UserError
from holdfast.engines.torch.files.config import from_hugging_face

PR_SET_PDEATHSIG, SIGKILL = 1, 9
TICK_S = 0.5
# What a model's directory needs. Some repositories have the same weights a second time, in their maker's own form.
WANTED = ["*.json", "*.safetensors", "*.jinja"]
UNWANTED = ["*/*", "consolidated*"]
WORDS_MAX = 300


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def main(argv: list[str]) -> int:
    parent, repo, revision = int(argv[0]), argv[1], argv[2] or None
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # dead already
        return 1
    try:
        _check(repo, revision, any_family=argv[3:] == ["any"])
        threading.Thread(target=_count, args=(repo, _total(repo, revision)), daemon=True).start()
        path = snapshot_download(repo, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED)
        say(path=path)
    except UserError as error:
        say(refused=str(error))
    except GatedRepoError:
        say(refused=f"the Hub shows {repo} to some users only; ask for access there, then `hf auth login` or HF_TOKEN")
    except RepositoryNotFoundError:
        say(refused="there is no such path, and no such model on the Hub, or a private one (`hf auth login`, HF_TOKEN)")
    except RevisionNotFoundError:
        say(refused=f"{repo} has no revision {revision}")
    except Exception as error:  # whatever the network and its library come up with
        say(failed=_cause(error))
        return 1
    return 0


def _cause(error: BaseException) -> str:
    """Return the text of the first of a chain of errors: the later ones only say that there was one."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return " ".join(str(error).split())[:WORDS_MAX] or type(error).__name__


def _check(repo: str, revision: str | None, any_family: bool) -> None:
    """Raise UserError for a model that cannot be served, by its smallest file."""
    try:
        config = json.loads(Path(hf_hub_download(repo, "config.json", revision=revision)).read_bytes())
    except (FileNotFoundError, EntryNotFoundError) as error:
        if "Local" in type(error).__name__:  # it may exist at the Hub: only the network is missing
            raise
        one = f"`hf download {repo} FILE.gguf --local-dir DIR`; then --model DIR/FILE.gguf"
        raise UserError(f"it has no config.json; if it has GGUF files, fetch one: {one}") from error
    if not any_family:
        from_hugging_face(config)


def _total(repo: str, revision: str | None) -> int | None:
    try:
        files = HfApi().model_info(repo, revision=revision, files_metadata=True).siblings or []
    except Exception:  # a number for a bar is not worth a failure
        return None
    wanted = [file for file in files if file.rfilename.endswith((".json", ".safetensors", ".jinja"))]
    plain = [file for file in wanted if "/" not in file.rfilename and not file.rfilename.startswith("consolidated")]
    return sum(file.size or 0 for file in plain) or None


def _count(repo: str, total: int | None) -> None:
    """Tell how much of it is here, for as long as this process lives."""
    blobs = Path(HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "blobs"
    pause = threading.Event()
    while True:
        done = sum(file.stat().st_size for file in blobs.glob("*") if file.exists())
        say(done=min(done, total) if total else done, total=total)
        pause.wait(TICK_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
