"""The election: locks, the lifecycle of an engine with a standby, and the epochs that tell leaders apart."""
