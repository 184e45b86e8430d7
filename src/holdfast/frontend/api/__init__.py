"""The OpenAI request and error shapes: from body bytes to one normalised request, or a named refusal."""
