"""Answers kept for the next one who asks."""

from __future__ import annotations

from headrace.caching.base import Recorder, ResponseCache

__all__ = ["Recorder", "ResponseCache"]
