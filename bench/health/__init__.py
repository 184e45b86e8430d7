"""`python -m bench.health` causes each fault on purpose, and tells what became of it."""
