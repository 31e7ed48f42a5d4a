"""The front's estimate of what the engine has cached, against the engine's own pool."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.backends.prefixes import PrefixIndex
from headrace.engine.blocks import BlockPool, hash_block

BLOCK = 4


def chain(prompt: list[int], salt: bytes = b"") -> list[bytes]:
    hashes: list[bytes] = []
    for start in range(0, len(prompt) // BLOCK * BLOCK, BLOCK):
        parent = hashes[-1] if hashes else b""
        hashes.append(hash_block(parent, prompt[start : start + BLOCK], salt))
    return hashes


def test_whole_blocks_from_the_beginning_count_and_never_the_last_token() -> None:
    index = PrefixIndex()
    prompt = list(range(12))
    index.update(chain(prompt), [])
    assert index.cached_tokens(prompt, b"", BLOCK) == 8
    assert index.cached_tokens([*prompt, 99], b"", BLOCK) == 12
    assert index.cached_tokens([*prompt[:6], 99, 99, 99], b"", BLOCK) == 4
    assert index.cached_tokens([99, *prompt], b"", BLOCK) == 0
    assert index.cached_tokens(prompt, b"another tenant", BLOCK) == 0
    index.update([], chain(prompt)[1:2])
    assert index.cached_tokens([*prompt, 99], b"", BLOCK) == 4
    index.clear()
    assert index.cached_tokens(prompt, b"", BLOCK) == 0


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=14), st.booleans()),
        min_size=1,
        max_size=30,
    )
)
def test_follows_a_pool_through_reports(uses: list[tuple[list[int], bool]]) -> None:
    """Prompts come and go in a pool that is too small for all; reports come now and then."""
    pool = BlockPool(5, BLOCK, prefix_cache=True)
    index = PrefixIndex()
    for prompt, report in uses:
        hashes = chain(prompt)
        hits = pool.match(hashes)
        pool.acquire(hits)
        table = hits + pool.allocate(-(-len(prompt) // BLOCK) - len(hits))
        for block, digest in zip(table[len(hits) :], hashes[len(hits) :], strict=False):
            pool.publish(block, digest)
        pool.release(table)
        if report:
            index.update(*pool.drain_changes())
            assert index.cached_tokens([*prompt, 1], b"", BLOCK) == BLOCK * len(pool.match(hashes))
