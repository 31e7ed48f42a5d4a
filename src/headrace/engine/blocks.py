"""KV memory as reference-counted blocks of fixed size, shared between equal prefixes.

A block is in one of three states: held (referenced by block tables), cached (free, but its content
is known by hash and can be revived) or blank (free and worthless). Allocation takes blank blocks
first and then the cached block that was released longest ago.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence

__all__ = ["BlockPool", "hash_block"]

_DIGEST_SIZE = 32


def hash_block(parent: bytes, tokens: Sequence[int], salt: bytes = b"") -> bytes:
    """Hash of a full block in its chain: equal only for equal salt, equal history and tokens.

    `parent` is the hash of the block before, or empty for the first one; only there the salt
    enters, and from there it reaches every later hash. Every part but the last has a fixed width,
    so no two inputs read the same.
    """
    if not parent:
        parent = hashlib.blake2b(salt, digest_size=_DIGEST_SIZE, person=b"kv-root").digest()
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    return hashlib.blake2b(parent + packed, digest_size=_DIGEST_SIZE, person=b"kv-block").digest()


class BlockPool:
    """Owned by the engine loop; every operation is O(1) a block.

    A block is shared only after `publish`, which its writer calls once every slot is computed;
    nobody writes to it from then on. A second block of the same hash stays unshared, so block
    tables never change behind a sequence's back.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError("a pool needs at least one block of at least one token")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.queries_total = 0
        """Prompt tokens looked up in the prefix cache."""
        self.hits_total = 0
        """Of those, tokens found."""
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, bytes] = OrderedDict()
        self._added: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def usage(self) -> float:
        """Share of blocks held by sequences, 0..1."""
        return self.num_used / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known run from the start of a chain. Takes no reference."""
        found = []
        for digest in hashes:
            block = self._by_hash.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def count_query(self, tokens: int, hits: int) -> None:
        self.queries_total += tokens
        self.hits_total += hits

    def acquire(self, blocks: Iterable[int]) -> None:
        """Takes a reference to each of these matched blocks, reviving the free ones."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` fresh blocks to write to; evicts cached ones where needed.

        Raises ValueError, changing nothing, if fewer are free.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} free")
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, digest = self._cached.popitem(last=False)
            self._evict(block, digest)
        self._references[block] = 1
        return block

    def _evict(self, block: int, digest: bytes) -> None:
        self._hashes[block] = None
        del self._by_hash[digest]
        if digest in self._added:
            del self._added[digest]
        else:
            self._evicted[digest] = None

    def release(self, table: Sequence[int]) -> None:
        """Drops one reference to each block of a chain, the tail first: so it is evicted first,
        and what remains of a chain is always its useful beginning."""
        for block in reversed(table):
            count = self._references[block] - 1
            if count < 0:
                raise ValueError(f"block {block} released more often than taken")
            self._references[block] = count
            if count == 0:
                digest = self._hashes[block]
                if digest is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = digest

    def publish(self, block: int, digest: bytes) -> None:
        """Makes a held, completely computed block known under its hash."""
        if not self.prefix_cache or digest in self._by_hash:
            return
        if self._references[block] == 0 or self._hashes[block] is not None:
            raise ValueError(f"block {block} is free or already published")
        self._hashes[block] = digest
        self._by_hash[digest] = block
        if digest in self._evicted:
            del self._evicted[digest]
        else:
            self._added[digest] = None

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Hashes (added, evicted) since the last call. A hash is in one list at most: what came
        and went in between is left out, so their order does not matter."""
        added, evicted = list(self._added), list(self._evicted)
        self._added.clear()
        self._evicted.clear()
        return added, evicted

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless the books are right and `tables` are all the holders."""
        held = [0] * self.num_blocks
        for table in tables:
            for block in table:
                held[block] += 1
        _require(held == self._references, "reference counts differ from the block tables")
        free = sorted([*self._blank, *self._cached])
        expected = [block for block, count in enumerate(held) if count == 0]
        _require(free == expected, "free lists differ from the unreferenced blocks")
        _require(all(self._hashes[b] is None for b in self._blank), "a blank block has a hash")
        _require(
            all(self._hashes[b] == digest for b, digest in self._cached.items()),
            "a cached block has another hash",
        )
        known = {digest: block for block, digest in enumerate(self._hashes) if digest is not None}
        _require(known == self._by_hash, "the hash map differs from the blocks' hashes")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)
