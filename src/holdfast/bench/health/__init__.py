"""`holdfast bench health`: each fault on purpose, and what became of it."""
