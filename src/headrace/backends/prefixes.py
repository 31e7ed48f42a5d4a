"""What the engine's prefix cache holds, as far as the front was told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.engine.blocks import hash_block

__all__ = ["PrefixIndex"]


class PrefixIndex:
    """Follows the blocks that each step adds and evicts. Event loop only.

    An estimate: what it says of a prompt may have changed when the engine comes to it.
    """

    def __init__(self) -> None:
        self._known: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._known)

    def update(self, added: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        self._known.update(added)
        self._known.difference_update(evicted)

    def clear(self) -> None:
        self._known.clear()

    def cached_tokens(self, prompt: Sequence[int], salt: bytes, block_size: int) -> int:
        """Tokens at the prompt's beginning that the engine need not compute; never all of them."""
        digest = b""
        cached = 0
        while cached + block_size < len(prompt):
            digest = hash_block(digest, prompt[cached : cached + block_size], salt)
            if digest not in self._known:
                break
            cached += block_size
        return cached
