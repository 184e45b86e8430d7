"""What the kernel lets a process have. Read and raised at its start, once."""

from __future__ import annotations

import contextlib
import resource
import sys


def raise_descriptor_limit() -> None:
    """Slabs, connections and pidfds are descriptors: take as many as this process may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptor_limit() -> int:
    """How many descriptors this process may have at present."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
