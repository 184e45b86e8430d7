"""What `make prove-data-path` does to a deployment of workers, and what clients saw."""
