"""Allocation and prefix caching of KV blocks. Block ids only; cache/pool.py holds the memory."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b


def root_hash(salt: str) -> bytes:
    """Return the parent hash of the first block of a sequence. Chains with different salts share no blocks."""
    return blake2b(salt.encode(), digest_size=16).digest()


def hash_block(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the hash of a full block's content: its tokens and, through `parent`, all tokens before them."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


@dataclass
class BlockCounters:
    allocated: int = 0  # blocks allocated with undefined content
    hits: int = 0  # blocks reused with their content (prefix cache hits)
    registered: int = 0  # blocks whose hash was registered
    evictions: int = 0  # cached blocks evicted to be allocated again


class BlockAllocator:
    """Reference-counted KV blocks with a prefix cache.

    Each block is in exactly one state: free; cached (unreferenced, but its content can still be matched); or in use by
    one or more requests. When no block is free, the least recently used cached block is evicted.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_reuse: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_reuse = prefix_reuse
        self.counters = BlockCounters()
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Number of blocks that allocate() could return now, free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def in_use(self) -> int:
        return self.num_blocks - self.available

    def references(self) -> dict[int, int]:
        """Return the reference count of each block in use."""
        return {block: refs for block, refs in enumerate(self._refs) if refs > 0}

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest prefix of `hashes` that is cached or in use. Takes no references."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def shortage(self, shared: Sequence[int], fresh: int) -> int:
        """Return how many blocks are missing to share() `shared` and allocate() `fresh` ones; <= 0 if none."""
        revived = sum(1 for block in shared if self._refs[block] == 0)
        return fresh + revived - self.available

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of `blocks`, which match() returned."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1
        self.counters.hits += len(blocks)

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with undefined content and one reference each, evicting cached ones if needed.

        Raises RuntimeError if fewer are available.
        """
        if count > self.available:
            raise RuntimeError(f"{count} blocks were requested and {self.available} are available")
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        self.counters.allocated += count
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block.

        Blocks with a registered hash become cached, the last one of the sequence first: the end of a sequence is then
        evicted before its beginning, which more requests can share.
        """
        for block in reversed(blocks):
            if self._refs[block] == 0:
                raise RuntimeError(f"block {block} was freed twice")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._hash_of[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def register(self, block: int, block_hash: bytes) -> None:
        """Record the content of a block in use, for match(). If another block has the same content, that one stays."""
        if self._refs[block] == 0:
            raise RuntimeError(f"block {block} is not in use and cannot be registered")
        if not self.prefix_reuse or self._hash_of[block] is not None or block_hash in self._block_of:
            return
        self._hash_of[block] = block_hash
        self._block_of[block_hash] = block
        self.counters.registered += 1

    def check(self) -> None:
        """Raise RuntimeError if the state is inconsistent: each block has one state, each hash belongs to one block."""
        free, cached = set(self._free), set(self._cached)
        used = {block for block, refs in enumerate(self._refs) if refs > 0}
        if len(free) != len(self._free) or len(free) + len(cached) + len(used) != self.num_blocks:
            counts = f"{len(self._free)} free, {len(cached)} cached, {len(used)} in use"
            raise RuntimeError(f"{counts}: that is not {self.num_blocks} blocks")
        if free | cached | used != set(range(self.num_blocks)) or min(self._refs, default=0) < 0:
            raise RuntimeError("a block is in two states or in none")
        hashed = {block: block_hash for block, block_hash in enumerate(self._hash_of) if block_hash is not None}
        if {block_hash: block for block, block_hash in hashed.items()} != self._block_of:
            raise RuntimeError("the hashes of blocks and the blocks of hashes differ")
        if free & hashed.keys() or not cached <= hashed.keys():
            raise RuntimeError("a free block has a hash, or a cached one has none")

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        block_hash = self._hash_of[block]
        assert block_hash is not None
        self._hash_of[block] = None
        del self._block_of[block_hash]
        self.counters.evictions += 1
        return block
