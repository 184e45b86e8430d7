"""Key-value with leases and watches: one contract, an embedded store for one machine and etcd for a cluster."""
