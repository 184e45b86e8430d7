"""The worker process: hosts an engine, serves its streams, beats, drains."""
