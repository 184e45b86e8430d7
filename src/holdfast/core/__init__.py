"""Types and helpers for all other packages: addresses, requests, errors, ports. Imports no other package of ours."""
