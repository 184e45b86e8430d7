"""How each process is made from its settings (`python -m holdfast.roles` runs one), and a deployment kept running."""
