"""Plans many models on few devices: which replicas are HOT, WARM or COLD, and where. Pure: it decides and does
nothing."""
