"""Election locks under test, and requests whose answers are known."""
