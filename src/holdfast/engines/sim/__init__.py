"""The sim engine makes deterministic tokens without a model, with faults on command, for tests and scale work."""
