"""A fleet of real processes on this machine under load: `make prove-fleet-local`."""
