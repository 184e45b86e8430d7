"""`holdfast bench degrade`: capacity falls to nothing and comes back, under load of every tier, and who noticed."""
