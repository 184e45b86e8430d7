"""HTTP/1.1: requests read, responses written, connections that take turns, and the server that has them."""
