"""Frames and messages between processes, and the HTTP protocol. The only types that cross processes live here
and in `core.requests`."""
