"""Implements HTTP/1.1: request reader, response encoding, connections, and the server that owns them."""
