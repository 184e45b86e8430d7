"""Work on a GPU and looks at one, for the benches and tests that need it."""
