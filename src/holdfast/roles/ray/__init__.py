"""A fleet on a Ray cluster. Only `cluster` imports Ray, and only when it is asked for."""
