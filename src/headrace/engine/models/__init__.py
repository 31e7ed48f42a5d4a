"""Models: where they come from, their weights, text codec and forward pass."""
