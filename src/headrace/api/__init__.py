"""The HTTP edge: wire format in, wire format out. It decides nothing."""

from __future__ import annotations

from headrace.api.app import create_app

__all__ = ["create_app"]
