"""Simulated worlds: rooms' real code on made-up time, without processes or sockets. Benches run them too."""
