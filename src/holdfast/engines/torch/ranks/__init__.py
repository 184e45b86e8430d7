"""A model over several processes: shares, group, the words between leader and ranks."""
