"""Changes of a manifest under load, each hit by kills: `make prove-rollouts`."""
