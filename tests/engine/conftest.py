"""Fixtures for tests with a real engine process."""

from support.hash_engine import hash_builder

__all__ = ["hash_builder"]
