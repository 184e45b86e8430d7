"""The worker process hosts an engine, serves its streams, sends heartbeats, and drains."""
