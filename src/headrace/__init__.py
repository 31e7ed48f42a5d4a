"""Headrace: many requests in, one well-fed language model out."""

__version__ = "0.1.0"

__all__ = ["__version__"]
