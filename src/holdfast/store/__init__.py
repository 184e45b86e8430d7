"""Provides a key-value store with leases and watches: an embedded one for one machine, and etcd for a cluster."""
