"""The forward pass: parameters, pages, attention, one step over them."""
