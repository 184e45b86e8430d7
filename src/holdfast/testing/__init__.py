"""The rig that starts, breaks and watches deployments, for our tests, benches and proofs and for other people's."""
