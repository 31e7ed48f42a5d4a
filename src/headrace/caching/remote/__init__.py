"""Answers, and news of them, shared with other servers in Redis or Valkey."""

from __future__ import annotations

from headrace.caching.remote.breaker import Breaker
from headrace.caching.remote.link import Link, RemoteDownError, RemoteSettings
from headrace.caching.remote.remote import Remote

__all__ = ["Breaker", "Link", "Remote", "RemoteDownError", "RemoteSettings"]
