"""The scheduler on a virtual clock, beside simpler ones."""
