"""Bounds of numbers that are read from the store: whoever goes on from one that nobody counts or measures would do so
for ever. Checked where a record is read, which then cannot be; not where it is made."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**53)]  # what all readers of JSON agree on
UnixS = Annotated[float, Meta(ge=0.0, le=1e11)]  # until the year 5138
Seconds = Annotated[float, Meta(le=1e11)]  # that passed; rounding may make a little less than none of them
