from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.blocks import BlockPool, hash_block


def chain(count: int, *, salt: bytes = b"", first: int = 0) -> list[bytes]:
    hashes: list[bytes] = []
    for index in range(count):
        parent = hashes[-1] if hashes else b""
        hashes.append(hash_block(parent, [first + index, 7], salt))
    return hashes


def filled(pool: BlockPool, hashes: list[bytes]) -> list[int]:
    table = pool.allocate(len(hashes))
    for block, digest in zip(table, hashes, strict=True):
        pool.publish(block, digest)
    return table


def test_hash_depends_on_salt_history_and_tokens() -> None:
    root = hash_block(b"", [1, 2], b"a")
    assert len(root) >= 16
    assert root == hash_block(b"", [1, 2], b"a")
    others = {
        hash_block(b"", [1, 2], b""),
        hash_block(b"", [1, 2], b"b"),
        hash_block(b"", [2, 1], b"a"),
        hash_block(root, [1, 2], b"a"),
        hash_block(hash_block(b"", [3, 4], b"a"), [1, 2], b"a"),
    }
    assert len(others | {root}) == 6


def test_salt_enters_at_the_root_only() -> None:
    root = hash_block(b"", [1], b"tenant")
    assert hash_block(root, [2], b"tenant") == hash_block(root, [2])


@given(st.lists(st.integers(0, 2**32 - 1), max_size=4), st.binary(max_size=80))
def test_hash_input_is_unambiguous(tokens: list[int], salt: bytes) -> None:
    base = hash_block(b"", tokens, salt)
    # The bytes of a token moved into the salt, or of one token split into two, read otherwise.
    assert hash_block(b"", tokens, salt + b"\x01\x00\x00\x00") != hash_block(
        b"", [1, *tokens], salt
    )
    assert hash_block(b"", [*tokens, 0], salt) != base
    assert hash_block(b"", [257], salt) != hash_block(b"", [1, 1], salt)


def test_allocation_counts_and_refuses_without_side_effects() -> None:
    pool = BlockPool(4, 2, prefix_cache=True)
    table = pool.allocate(3)
    assert len(set(table)) == 3
    assert (pool.num_used, pool.num_free, pool.usage) == (3, 1, 0.75)
    with pytest.raises(ValueError, match="2 blocks asked for, 1 free"):
        pool.allocate(2)
    pool.check([table])
    pool.release(table)
    assert (pool.num_used, pool.usage) == (0, 0.0)
    pool.check([])


def test_blocks_for_rounds_up() -> None:
    pool = BlockPool(4, 16, prefix_cache=True)
    assert [pool.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


@pytest.mark.parametrize(("blocks", "size"), [(0, 1), (1, 0)])
def test_an_empty_pool_is_refused(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(blocks, size, prefix_cache=True)


def test_the_tail_of_a_chain_is_evicted_first() -> None:
    pool = BlockPool(4, 2, prefix_cache=True)
    hashes = chain(4)
    pool.release(filled(pool, hashes))
    for length in (3, 2, 1, 0):
        pool.allocate(1)
        assert len(pool.match(hashes)) == length


def test_the_least_recently_used_chain_goes_first_and_a_hit_renews() -> None:
    pool = BlockPool(4, 2, prefix_cache=True)
    old, new = chain(2), chain(2, first=100)
    old_table = filled(pool, old)
    new_table = filled(pool, new)
    pool.release(old_table)
    pool.release(new_table)
    pool.acquire(pool.match(old))
    pool.release(old_table)
    pool.allocate(2)
    assert pool.match(old) == old_table
    assert pool.match(new) == []


def test_worthless_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(3, 2, prefix_cache=True)
    hashes = chain(2)
    table = filled(pool, hashes) + pool.allocate(1)
    pool.release(table)
    assert pool.allocate(1) == [table[2]]
    assert pool.match(hashes) == table[:2]


def test_a_cached_block_is_revived_and_shared() -> None:
    pool = BlockPool(2, 2, prefix_cache=True)
    hashes = chain(2)
    table = filled(pool, hashes)
    pool.release(table)
    assert pool.is_free(table[0])
    pool.acquire(pool.match(hashes))
    pool.acquire(pool.match(hashes))
    pool.check([table, table])
    pool.release(table)
    assert not pool.is_free(table[0])
    assert pool.num_free == 0
    pool.release(table)
    pool.check([])


def test_match_stops_at_the_first_gap() -> None:
    pool = BlockPool(3, 2, prefix_cache=True)
    hashes = chain(3)
    table = pool.allocate(3)
    pool.publish(table[0], hashes[0])
    pool.publish(table[2], hashes[2])
    assert pool.match(hashes) == [table[0]]


def test_a_second_block_of_the_same_hash_stays_unshared() -> None:
    pool = BlockPool(2, 2, prefix_cache=True)
    digest = chain(1)[0]
    first, second = filled(pool, [digest]), filled(pool, [digest])
    assert pool.match([digest]) == first
    pool.release(second)
    pool.release(first)
    assert pool.allocate(1) == second
    assert pool.match([digest]) == first


def test_without_prefix_cache_nothing_is_known() -> None:
    pool = BlockPool(2, 2, prefix_cache=False)
    digest = chain(1)[0]
    table = filled(pool, [digest])
    assert pool.match([digest]) == []
    pool.release(table)
    assert pool.drain_changes() == ([], [])
    pool.check([])


def test_misuse_is_refused() -> None:
    pool = BlockPool(2, 2, prefix_cache=True)
    one, two = chain(2)
    table = filled(pool, [one])
    with pytest.raises(ValueError, match="already published"):
        pool.publish(table[0], two)
    pool.release(table)
    with pytest.raises(ValueError, match="free or already"):
        pool.publish(table[0], two)
    with pytest.raises(ValueError, match="more often than taken"):
        pool.release(table)


def test_changes_are_net() -> None:
    pool = BlockPool(1, 2, prefix_cache=True)
    one, two = chain(1)[0], chain(1, first=9)[0]
    pool.release(filled(pool, [one]))
    assert pool.drain_changes() == ([one], [])
    assert pool.drain_changes() == ([], [])
    pool.release(filled(pool, [two]))
    assert pool.drain_changes() == ([two], [one])
    pool.release(filled(pool, [one]))
    pool.release(filled(pool, [two]))
    assert pool.drain_changes() == ([], [])
    pool.allocate(1)
    assert pool.drain_changes() == ([], [two])


def test_queries_count_tokens() -> None:
    pool = BlockPool(1, 2, prefix_cache=True)
    pool.count_query(10, 4)
    pool.count_query(5, 0)
    assert (pool.queries_total, pool.hits_total) == (15, 4)


@pytest.mark.parametrize("kind", ["reference", "leak", "hash", "map", "double"])
def test_check_sees_broken_books(kind: str) -> None:
    pool = BlockPool(4, 2, prefix_cache=True)
    hashes = chain(3)
    table = filled(pool, hashes[:2])
    pool.release(filled(pool, hashes[2:]))
    pool.check([table])
    if kind == "reference":
        pool._references[table[0]] += 1
    elif kind == "leak":
        pool._blank.pop()
    elif kind == "hash":
        pool._hashes[pool._blank[-1]] = b"x"
    elif kind == "map":
        del pool._by_hash[hashes[0]]
    else:
        pool._blank.append(pool._blank[-1])
    with pytest.raises(AssertionError):
        pool.check([table])


@given(st.integers(1, 12), st.integers(0, 2**32))
def test_random_use_agrees_with_a_plain_model(num_blocks: int, seed: int) -> None:
    """Against a list of free blocks searched by hand: same hits, same evictions, no leak."""
    rng = random.Random(seed)
    pool = BlockPool(num_blocks, 2, prefix_cache=True)
    chains = [chain(6, first=first) for first in (0, 50, 100)]
    tables: list[list[int]] = []
    known: set[bytes] = set()
    free: list[bytes] = []  # hashes of cached free blocks, next to be evicted first
    names: dict[int, bytes] = {}

    def drop(table: list[int]) -> None:
        pool.release(table)
        held = {block for other in tables for block in other}
        free.extend(names[b] for b in reversed(table) if b not in held and b in names)

    for _ in range(60):
        hashes = rng.choice(chains)[: rng.randint(1, 6)]
        hits = pool.match(hashes)
        lengths = [n for n in range(len(hashes) + 1) if set(hashes[:n]) <= known]
        assert len(hits) == max(lengths)
        need = len(hashes) - len(hits)
        revived = [names[b] for b in hits if pool.is_free(b)]
        if need + len(revived) <= pool.num_free:
            blanks = pool.num_free - len(free)
            pool.acquire(hits)
            for digest in revived:
                free.remove(digest)
            table = hits + pool.allocate(need)
            evicted = [free.pop(0) for _ in range(need - blanks)]
            known.difference_update(evicted)
            names = {b: d for b, d in names.items() if d not in evicted}
            for block, digest in zip(table, hashes, strict=True):
                if digest not in known:
                    pool.publish(block, digest)
                    known.add(digest)
                    names[block] = digest
            tables.append(table)
        elif tables:
            drop(tables.pop(rng.randrange(len(tables))))
        pool.check(tables)
    while tables:
        drop(tables.pop())
    pool.check([])
    assert pool.num_used == 0
    # The front's mirror of the cache, fed by changes alone, ends up equal.
    added, gone = pool.drain_changes()
    assert (set(added), gone) == (known, [])


def test_a_chain_is_a_chain() -> None:
    hashes = chain(5)
    assert all(hash_block(a, [i + 1, 7]) == b for i, (a, b) in enumerate(pairwise(hashes)))
