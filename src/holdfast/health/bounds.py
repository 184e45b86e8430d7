"""Range checks for numbers in stored records: a corrupt value would otherwise stay in use. They run when a record is
decoded, not when it is created."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**53)]  # every JSON reader represents these integers exactly
UnixS = Annotated[float, Meta(ge=0.0, le=1e11)]  # until the year 5138
Seconds = Annotated[float, Meta(le=1e11)]  # a duration; rounding may make it slightly negative
