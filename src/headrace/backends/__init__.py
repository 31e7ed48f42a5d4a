"""Backends: one protocol, one implementation per file."""
