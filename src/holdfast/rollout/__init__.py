"""From one revision of a deployment to the next: what runs, what is to be done next, and where there is a way back."""
