from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yalis.cache.blocks import BlockAllocator, hash_block, root_hash


def chain(tokens: list[int], size: int, salt: str = "") -> list[bytes]:
    """Return the block hashes of a sequence."""
    hashes, parent = [], root_hash(salt)
    for start in range(0, len(tokens) - size + 1, size):
        parent = hash_block(parent, tokens[start : start + size])
        hashes.append(parent)
    return hashes


def test_hashes_cover_the_whole_prefix() -> None:
    hashes = chain([1, 2, 3, 4, 5, 6], 2)
    assert len(set(hashes)) == 3
    assert chain([1, 2, 3, 4], 2) == hashes[:2]
    assert chain([9, 2, 3, 4], 2)[1] != hashes[1]  # same tokens, another parent
    assert chain([1, 2], 2, "long_rope") != hashes[:1]
    assert hash_block(b"", [1, 256]) != hash_block(b"", [256, 1])


def test_hashes_do_not_depend_on_the_process() -> None:
    code = "from yalis.cache.blocks import *; print(hash_block(root_hash(''), [1, 2]).hex())"
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        seen = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
        assert seen.strip() == hash_block(root_hash(""), [1, 2]).hex()


def test_the_allocator_and_the_scheduler_need_no_torch() -> None:
    code = "import sys, yalis.scheduling.scheduler, yalis.cache.blocks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_freed_block_stays_cached_until_it_is_evicted() -> None:
    allocator = BlockAllocator(3, 2)
    hashes = chain([1, 2, 3, 4, 5, 6], 2)
    blocks = allocator.allocate(3)
    for block, block_hash in zip(blocks, hashes, strict=True):
        allocator.register(block, block_hash)
    allocator.free(blocks)
    allocator.check()
    assert allocator.available == 3
    assert allocator.match(hashes) == blocks
    # The end of the sequence is evicted first: more requests can share its beginning.
    [evicted] = allocator.allocate(1)
    assert evicted == blocks[2]
    assert allocator.match(hashes) == blocks[:2]
    assert allocator.counters.evictions == 1
    allocator.share(blocks[:2])
    assert allocator.counters.hits == 2
    assert allocator.available == 0
    allocator.check()


def test_eviction_is_least_recently_used_first() -> None:
    allocator = BlockAllocator(2, 1)
    first, second = allocator.allocate(2)
    allocator.register(first, b"first")
    allocator.register(second, b"second")
    allocator.free([first])
    allocator.free([second])
    allocator.share(allocator.match([b"first"]))
    allocator.free([first])  # now the most recently used
    assert allocator.allocate(1) == [second]


def test_free_blocks_are_allocated_before_cached_ones() -> None:
    allocator = BlockAllocator(2, 1)
    [block] = allocator.allocate(1)
    allocator.register(block, b"cached")
    allocator.free([block])
    assert allocator.allocate(1) != [block]
    assert allocator.match([b"cached"]) == [block]


def test_shared_blocks_stay_in_use_while_referenced() -> None:
    allocator = BlockAllocator(1, 1)
    [block] = allocator.allocate(1)
    allocator.register(block, b"x")
    allocator.share([block])
    allocator.free([block])
    assert allocator.available == 0
    assert allocator.references() == {block: 1}
    allocator.free([block])
    assert allocator.available == 1
    assert allocator.shortage([block], 0) == 0
    assert allocator.shortage([block], 1) == 1  # sharing it leaves none to allocate


def test_equal_content_keeps_its_first_block() -> None:
    allocator = BlockAllocator(2, 1)
    first, second = allocator.allocate(2)
    allocator.register(first, b"x")
    allocator.register(second, b"x")
    assert allocator.match([b"x"]) == [first]
    allocator.free([first, second])
    assert allocator.counters.registered == 1
    allocator.check()


def test_misuse_raises() -> None:
    allocator = BlockAllocator(2, 1)
    [block] = allocator.allocate(1)
    with pytest.raises(RuntimeError, match="2 blocks were requested and 1"):
        allocator.allocate(2)
    allocator.free([block])
    with pytest.raises(RuntimeError, match="freed twice"):
        allocator.free([block])
    with pytest.raises(RuntimeError, match="not in use"):
        allocator.register(block, b"x")


def test_check_detects_a_lost_block() -> None:
    allocator = BlockAllocator(2, 1)
    allocator._free.pop()
    with pytest.raises(RuntimeError, match="not 2 blocks"):
        allocator.check()
    allocator._free.append(1)  # listed twice
    with pytest.raises(RuntimeError, match="not 2 blocks"):
        allocator.check()


def test_without_prefix_reuse_nothing_is_cached() -> None:
    allocator = BlockAllocator(1, 1, prefix_reuse=False)
    [block] = allocator.allocate(1)
    allocator.register(block, b"x")
    allocator.free([block])
    assert allocator.match([b"x"]) == []
    allocator.check()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 8), st.booleans())
def test_random_use_matches_a_plain_model(seed: int, num_blocks: int, reuse: bool) -> None:
    """Compare with plain dictionaries of the blocks each holder references and of the registered contents."""
    rng = random.Random(seed)
    allocator = BlockAllocator(num_blocks, 1, reuse)
    holders: list[list[int]] = []
    content: dict[int, bytes] = {}
    for _ in range(80):
        held = {block for blocks in holders for block in blocks}
        assert allocator.in_use == len(held)
        action = rng.randrange(4)
        if action == 0:
            count = rng.randint(0, allocator.available)
            blocks = allocator.allocate(count)
            assert len(set(blocks)) == count
            assert not held & set(blocks), "a block in use was allocated"
            for block in blocks:
                content.pop(block, None)
            holders.append(blocks)
        elif action == 1 and holders:
            allocator.free(holders.pop(rng.randrange(len(holders))))
        elif action == 2 and held:
            block, block_hash = rng.choice(sorted(held)), bytes([rng.randrange(6)])
            if reuse and block not in content and block_hash not in content.values():
                content[block] = block_hash
            allocator.register(block, block_hash)
        elif action == 3:
            block_hash = bytes([rng.randrange(6)])
            found = allocator.match([block_hash])
            assert found == [block for block, known in content.items() if known == block_hash]
            allocator.share(found)
            holders.append(found)
        allocator.check()
    for blocks in holders:
        allocator.free(blocks)
    allocator.check()
    assert allocator.in_use == 0
