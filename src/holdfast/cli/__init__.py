"""The `holdfast` command, which connects the other packages."""
