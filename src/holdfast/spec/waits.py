"""Bounds on waits that several processes must agree on."""

from __future__ import annotations

# How long taking over may take, unless it must load. It takes milliseconds; if one hangs, the next engine must have
# taken over before frontends give held streams up (30 s), so there must be room for two.
WAKE_S = 12.0
