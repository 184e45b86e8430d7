"""Where torch is not installed nothing of its engine can be imported; `test_torch_is_here` says so."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("torch") is None:
    collect_ignore_glob = ["torch/*"]
