"""From logits to tokens: what engines that compute with torch share."""
