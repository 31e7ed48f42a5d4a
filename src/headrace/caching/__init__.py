"""Answers kept for the next one who asks."""

from __future__ import annotations

from headrace.caching.cache import CacheCounters, Found, Question, Recorder, ResponseCache
from headrace.caching.entry import CorruptEntryError, Entry, pack, unpack
from headrace.caching.epochs import Epochs, Scope
from headrace.caching.key import KeyMaker
from headrace.caching.memory import MemoryTier
from headrace.caching.policy import NO_CONTROLS, CachePolicy, Controls

__all__ = [
    "NO_CONTROLS",
    "CacheCounters",
    "CachePolicy",
    "Controls",
    "CorruptEntryError",
    "Entry",
    "Epochs",
    "Found",
    "KeyMaker",
    "MemoryTier",
    "Question",
    "Recorder",
    "ResponseCache",
    "Scope",
    "pack",
    "unpack",
]
