"""Frames and messages between processes, and the HTTP protocol. Types that are sent between processes are defined here
and in `core.requests`."""
