"""What `make prove-vault` does to a vault under load, and how it is judged."""
