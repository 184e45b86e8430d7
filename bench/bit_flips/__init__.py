"""What `make prove-bit-flips` does to an engine's weights, and how it looks for it."""
