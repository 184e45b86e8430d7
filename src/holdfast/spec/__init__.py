"""Describes what should run, as plain data: settings with help text, unit and default; launches; plans."""
