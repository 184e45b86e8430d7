"""`python -m bench.engine`: how fast the torch engine decodes."""
