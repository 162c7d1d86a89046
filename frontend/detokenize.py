"""Token ids to text, token by token, and stop strings."""
