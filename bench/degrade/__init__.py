"""`python -m bench.degrade`: capacity falls to nothing and comes back, under load of every tier."""
