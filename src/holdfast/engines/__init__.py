"""The engine contract and the engines: `sim` (deterministic, for tests and scale work)."""
