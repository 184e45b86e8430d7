"""Who may pull an engine's levers (`POST /engine/…`): they stop and start serving, so not whoever reaches the port.

Always true: who has the token may, from anywhere; else the kernel must say that the other end is a process of this
machine, of this user or root; and a page in that user's browser may not.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping


def refusal(headers: Mapping[bytes, bytes], uid: int | None, token: str) -> str:
    """Why a request may not, in words that say how it might; "": it may."""
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    if token and scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), token.encode()):
        return ""
    mend = "send `Authorization: Bearer` with its HOLDFAST_ENGINE_TOKEN" if token else "set HOLDFAST_ENGINE_TOKEN"
    if b"authorization" in headers:
        return f"the token is wrong; {mend}"
    if b"origin" in headers:
        return f"a web page may not do this; {mend}"
    if uid is None or uid not in (os.getuid(), 0):
        who = "whoever asks from another machine" if uid is None else f"uid {uid}"
        return f"{who} may not do this, only uid {os.getuid()} and root on this machine; or {mend}"
    return ""
