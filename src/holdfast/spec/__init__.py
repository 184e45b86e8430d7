"""What should run: the settings of every process, as plain data with one default each."""
