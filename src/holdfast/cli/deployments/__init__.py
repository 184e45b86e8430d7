"""Commands for a manifest's deployment while it runs, as kubectl has them: apply, diff, get, delete, rollout."""
