"""What should run, as plain data: settings with their sentences, units and defaults; launches; plans."""
