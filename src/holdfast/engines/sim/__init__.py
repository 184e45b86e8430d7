"""The sim engine: deterministic, without a model, with faults on command. For tests and scale work."""
