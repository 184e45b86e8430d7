"""What every shadow engine does with its vault: load, check, wake, rest, follow, and its further processes."""
