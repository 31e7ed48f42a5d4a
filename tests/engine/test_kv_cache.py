from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch

from headrace.engine import kv_cache
from headrace.engine.kv_cache import KVCache, available_bytes, block_bytes, plan_num_blocks
from headrace.engine.models.config import DecoderConfig, config_from_hf
from headrace.engine.models.errors import ModelError

CPU = torch.device("cpu")


@pytest.fixture
def config() -> DecoderConfig:
    return config_from_hf(
        {
            "model_type": "llama",
            "vocab_size": 10,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        }
    )


def _plan(config: DecoderConfig, kv_bytes: int | None, running: int = 8, context: int = 64) -> int:
    return plan_num_blocks(
        config,
        block_size=16,
        dtype=torch.float32,
        device=CPU,
        kv_bytes=kv_bytes,
        max_running=running,
        context_length=context,
    )


def test_bytes_are_those_reserved(config: DecoderConfig) -> None:
    size = block_bytes(config, 16, torch.float32)
    assert size == 2 * 3 * 2 * 16 * 8 * 4
    cache = KVCache(config, num_blocks=9, block_size=16, dtype=torch.float32, device=CPU)
    assert cache.bytes == 10 * size  # and the null block
    assert cache.num_blocks == 9


def test_budget_is_kept(config: DecoderConfig) -> None:
    size = block_bytes(config, 16, torch.float32)
    assert _plan(config, 7 * size) == 7
    assert _plan(config, 8 * size - 1) == 7


def test_never_more_than_could_be_used(config: DecoderConfig) -> None:
    assert _plan(config, 1 << 40, running=3, context=40) == 3 * 3
    assert _plan(config, None, running=1, context=16) == 1


def test_a_cpu_is_not_filled_unless_told(
    config: DecoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = block_bytes(config, 16, torch.float32)
    for free, blocks in ((1 << 40, (4 << 30) // size), (1000 * size, 500)):
        monkeypatch.setattr(kv_cache, "available_bytes", lambda _device, free=free: free)
        assert _plan(config, None, running=1 << 30) == blocks
    assert _plan(config, 1 << 40, running=1 << 40) == (1 << 40) // size


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_memory_is_taken_when_it_is_written(config: DecoderConfig) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    cache = KVCache(config, num_blocks=40_000, block_size=16, dtype=torch.float32, device=CPU)
    assert cache.bytes > 200 << 20
    assert resident() - before < 50 << 20
    assert not cache.blocks[-1].any()


def resident(blocks: torch.Tensor) -> float:
    """The share of its pages that are in memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    start = -(-blocks.data_ptr() // page) * page
    pages = (blocks.data_ptr() + blocks.nbytes - start) // page
    found = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * page), found)
    assert done == 0, os.strerror(ctypes.get_errno())
    return sum(state & 1 for state in found) / pages


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_populating_takes_memory_and_changes_nothing(config: DecoderConfig) -> None:
    cache = KVCache(config, num_blocks=8_000, block_size=16, dtype=torch.float32, device=CPU)
    cache.blocks[::500] = 7.0
    slices = 0
    while cache.populate():
        slices += 1
    assert slices in (0, -(-cache.bytes // (8 << 20)))
    if slices:  # else the system cannot
        assert resident(cache.blocks) > 0.9
    assert not cache.populate(), "done is done"
    assert (cache.blocks[::500] == 7.0).all()
    assert cache.blocks.sum() == 7.0 * cache.blocks[::500].numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_begins_with_zeros_of_its_type(config: DecoderConfig, dtype: torch.dtype) -> None:
    cache = KVCache(config, num_blocks=2, block_size=4, dtype=dtype, device=CPU)
    assert cache.blocks.dtype == dtype
    assert cache.blocks.shape == (3, len(cache.layers) * 2 * 2 * 4 * 8)
    assert not cache.blocks.any()


def test_layers_share_one_index_and_no_row(config: DecoderConfig) -> None:
    cache = KVCache(config, num_blocks=2, block_size=4, dtype=torch.float32, device=CPU)
    stride = cache.geometry.block_stride
    index = torch.tensor([block * stride + plane for block in range(3) for plane in range(4)])
    for number, layer in enumerate(cache.layers, start=1):
        assert not layer[index].any(), "another layer wrote here"
        layer[index] = number
    assert cache.blocks.all(), "every row belongs to a layer"


def test_too_small_a_budget_is_refused(config: DecoderConfig) -> None:
    with pytest.raises(ModelError, match="KV block takes"):
        _plan(config, block_bytes(config, 16, torch.float32) - 1)


def test_clear_touches_no_other_block(config: DecoderConfig) -> None:
    cache = KVCache(config, num_blocks=4, block_size=16, dtype=torch.float32, device=CPU)
    cache.blocks.fill_(float("nan"))
    cache.clear({2, 0})
    assert not cache.blocks[[0, 2]].any()
    assert cache.blocks[[1, 3, 4]].isnan().all()


def _machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable: 4000 kB\n"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"proc/meminfo": MEMINFO}, 4_096_000),
        (
            {
                "proc/meminfo": MEMINFO,
                "sys/fs/cgroup/memory.max": "max\n",
                "sys/fs/cgroup/memory.current": "5\n",
            },
            4_096_000,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "sys/fs/cgroup/memory.max": "3000000\n",
                "sys/fs/cgroup/memory.current": "1000000\n",
            },
            2_000_000,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "4000\n",
            },
            0,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{1 << 62}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "4000\n",
            },
            4_096_000,
        ),
    ],
)
def test_available_bytes(tmp_path: Path, files: dict[str, str], free: int) -> None:
    assert available_bytes(CPU, _machine(tmp_path, files)) == free


def test_unknown_memory_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="KV cache size"):
        available_bytes(CPU, tmp_path)
