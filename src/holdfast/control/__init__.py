"""The control process checks the workers, decides how much traffic each gets, and writes that to the store."""
