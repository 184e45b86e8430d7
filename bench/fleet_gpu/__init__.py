"""A fleet's WARM replicas on a GPU: `make prove-fleet-gpu`."""
