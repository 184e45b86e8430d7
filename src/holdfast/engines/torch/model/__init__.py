"""The forward pass: parameters, pages, attention, and one step that uses them."""
