"""What `make prove-torment` does to a whole deployment, and how its answers are judged."""
