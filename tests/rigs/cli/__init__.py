"""The command line under test: run in this process, on a terminal, in a place of its own."""
