"""Streams that survive worker failures: ledger, resume policy, connections to workers, dispatcher."""
