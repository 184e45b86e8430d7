"""Runs `make prove-harm`: every check is given false and true alarms while long streams run.

A check may report, lower trust and ask for a replacement. It may not take the last engine away: see "Checks must not do
harm" in docs/health.md.
"""
