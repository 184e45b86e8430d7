"""The values of secrets on this machine: read from a directory, and kept for as long as a revision needs them.

`SECRETS_DIR/SECRET/KEY` is one value, as Kubernetes mounts a secret. The values that revisions were asked for with are
kept in `STATE_DIR/secrets.json`, by their hash: the store holds the hashes alone, and a supervisor that is started
again without the variables or files finds the values here.

Always true: the kept values are readable by their owner alone; a hash tells nothing of its value without the random key
in that file.
"""

from __future__ import annotations

import hashlib
import hmac
import random
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from holdfast.core.errors import Refused
from holdfast.spec.manifest.secrets import INHERITED, Digests, inherited, values_of
from holdfast.spec.manifest.types import Manifest
from holdfast.supervise.records import write_whole

FILE = "secrets.json"
VALUE_BYTES_MAX = 1024 * 1024  # what Kubernetes allows for a whole secret
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,254}")


class _Kept(msgspec.Struct):
    """What stands in the file."""

    hash_key: str
    values: dict[str, str] = {}  # by hash
    last: dict[str, str] = {}  # hashes that the deployment was last asked for with, by reference


class SecretFiles:
    """The secrets of one state directory. Every call reads the files again: they may change at any time."""

    def __init__(self, state_dir: Path, directory: str = "") -> None:
        self.state_dir = str(state_dir)
        self._path = state_dir / FILE
        self._folder = Path(directory) if directory else state_dir / "secrets"

    @property
    def directory(self) -> str:
        return str(self._folder)

    def read(self, secret: str, key: str) -> str | None:
        """Return the value without its last line break; Refused, if it cannot be read."""
        path = self._folder / secret / key
        try:
            with path.open("rb") as file:
                data = file.read(VALUE_BYTES_MAX + 1)
            if len(data) > VALUE_BYTES_MAX:
                raise Refused(f"the secret {path} is over {VALUE_BYTES_MAX} bytes; is it the right file?")
            return data.decode().removesuffix("\n").removesuffix("\r")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise Refused(f"the secret {path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise Refused(f"the secret {path} is not text in UTF-8; a variable cannot hold it") from error

    def keys(self, secret: str) -> tuple[str, ...] | None:
        try:
            names = [path.name for path in (self._folder / secret).iterdir() if path.is_file()]
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise Refused(f"the secret {self._folder / secret} cannot be read: {error.strerror}") from error
        return tuple(sorted(name for name in names if _KEY.fullmatch(name)))

    def last(self, reference: str) -> str | None:
        kept = self._read()
        digest = kept.last.get(reference) if kept is not None else None
        return kept.values.get(digest) if kept is not None and digest is not None else None

    def kept(self, digest: str) -> str | None:
        kept = self._read()
        return kept.values.get(digest) if kept is not None else None

    def inherited(self) -> dict[str, str]:
        """Return the variables that guard something as the deployment was last asked for with them."""
        found = {name: self.last(inherited(name)) for name in INHERITED}
        return {name: value for name, value in found.items() if value is not None}

    # -- for a revision that is asked for

    def digests(self, manifest: Manifest, environ: Mapping[str, str], *, keep: bool = True) -> dict[str, str]:
        """Return the hashes of the values that the manifest refers to, as they are now, and keep the values."""
        values = values_of(manifest, self, environ)
        before = self._read()
        if not values:
            return {}
        kept = before or _Kept(random.SystemRandom().randbytes(32).hex())
        digests = {one: _digest(kept.hash_key, value) for one, value in values.items()}
        added = {digest: values[one] for one, digest in digests.items() if digest not in kept.values}
        if keep and (added or before is None):
            self._write(msgspec.structs.replace(kept, values=kept.values | added))
        return digests

    def asked_with(self, digests: Digests, needed: Collection[str] | None = None) -> None:
        """Remember that the deployment was asked for with these values, and forget those that neither this nor a
        revision in `needed` has; None: forget nothing."""
        kept = self._read()
        if kept is None:
            return
        keep = {*digests.values(), *(kept.values if needed is None else needed)}
        values = {digest: value for digest, value in kept.values.items() if digest in keep}
        self._write(msgspec.structs.replace(kept, values=values, last=dict(digests)))

    def forget(self) -> None:
        """Remove all kept values: the deployment was deleted."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> _Kept | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Kept)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            what = f"the kept values of secrets in {self._path} cannot be read: {error}"
            raise Refused(f"{what}; remove the file, and `holdfast apply -f FILE` with all secrets there") from error

    def _write(self, kept: _Kept) -> None:
        write_whole(self._path, msgspec.json.encode(kept))


def _digest(hash_key: str, value: str) -> str:
    return hmac.new(bytes.fromhex(hash_key), value.encode(), hashlib.sha256).hexdigest()[:32]
