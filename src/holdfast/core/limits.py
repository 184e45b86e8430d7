"""The limit on a process's file descriptors: checked and raised once, at its start."""

from __future__ import annotations

import contextlib
import resource
import sys

from holdfast.core.errors import Refused

# An idle process of ours uses about 30; a vault reserves 64 for its clients; the rest is for other connections.
DESCRIPTORS_MIN = 128


def raise_descriptor_limit() -> None:
    """Raise the soft limit to the hard limit, since slabs, connections and pidfds are descriptors. Raise `Refused` if
    the hard limit is too low: a retry would not help."""
    check_descriptor_limit()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_descriptor_limit() -> None:
    """Raise `Refused` if the hard limit is too low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS_MIN:
        mend = "raise the hard limit (`ulimit -Hn`, systemd's LimitNOFILE, a container's --ulimit nofile)"
        raise Refused(f"a process may have {hard} descriptors here, and needs {DESCRIPTORS_MIN} at least; {mend}")


def descriptor_limit() -> int:
    """Return the current soft limit of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
