"""What the kernel lets a process have. Looked at and raised at its start, once."""

from __future__ import annotations

import contextlib
import resource
import sys

from holdfast.core.errors import Refused

# An idle process of ours has about 30, a vault keeps 64 for those who are there, and clients come on top.
DESCRIPTORS_MIN = 128


def raise_descriptor_limit() -> None:
    """Slabs, connections and pidfds are descriptors: take as many as this process may have. Refused where those are
    too few: no second try finds more."""
    check_descriptor_limit()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_descriptor_limit() -> None:
    """Whether a process may have enough of them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS_MIN:
        mend = "raise the hard limit (`ulimit -Hn`, systemd's LimitNOFILE, a container's --ulimit nofile)"
        raise Refused(f"a process may have {hard} descriptors here, and needs {DESCRIPTORS_MIN} at least; {mend}")


def descriptor_limit() -> int:
    """How many descriptors this process may have at present."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
