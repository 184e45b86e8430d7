"""Whether workers are alive: a pure judge, and the local probe that confirms its suspicions."""
