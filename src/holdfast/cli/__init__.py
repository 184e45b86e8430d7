"""The `holdfast` command; wires rooms together."""
