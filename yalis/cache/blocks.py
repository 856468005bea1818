"""Which KV blocks are free, in use, or kept for reuse. Numbers only: the storage itself is in pool.py."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b


def root_hash(salt: str) -> bytes:
    """Where a chain of block hashes begins; chains with another salt never meet."""
    return blake2b(salt.encode(), digest_size=16).digest()


def hash_block(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Names the content of a full block: its tokens and, through the parent, every token before them."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


@dataclass
class BlockCounters:
    allocated: int = 0  # blocks handed out fresh
    hits: int = 0  # blocks handed out with their content
    registered: int = 0  # blocks whose content was given a name
    evictions: int = 0  # kept contents given up for a fresh block


class BlockAllocator:
    """Counts references to blocks. Each block is exactly one of: free; kept (unused, but its content can be found);
    in use by one or more requests. Kept blocks are given up, longest unused first, when no free one is left."""

    def __init__(self, num_blocks: int, block_size: int, prefix_reuse: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_reuse = prefix_reuse
        self.counters = BlockCounters()
        self._free = list(range(num_blocks - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()  # longest unused first
        self._refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Blocks that allocate() could hand out now."""
        return len(self._free) + len(self._kept)

    @property
    def in_use(self) -> int:
        return self.num_blocks - self.available

    def references(self) -> dict[int, int]:
        """How many hold each block in use."""
        return {block: refs for block, refs in enumerate(self._refs) if refs > 0}

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks holding the longest known run of these contents; they stay as they are until share()."""
        found: list[int] = []
        for name in hashes:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def shortage(self, shared: Sequence[int], fresh: int) -> int:
        """How many blocks are missing to share() these and allocate() that many; 0 or less when it would succeed."""
        revived = sum(1 for block in shared if self._refs[block] == 0)
        return fresh + revived - self.available

    def share(self, blocks: Sequence[int]) -> None:
        """Take one more reference to blocks that match() found."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._kept[block]
            self._refs[block] += 1
        self.counters.hits += len(blocks)

    def allocate(self, count: int) -> list[int]:
        """Blocks of unknown content, one reference each; the caller has seen that enough are available."""
        if count > self.available:
            raise RuntimeError(f"{count} blocks were asked for and {self.available} are available")
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        self.counters.allocated += count
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give back one reference each. The end of a chain is given up before its beginning, which more can share."""
        for block in reversed(blocks):
            if self._refs[block] == 0:
                raise RuntimeError(f"block {block} was freed twice")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._hash_of[block] is None:
                    self._free.append(block)
                else:
                    self._kept[block] = None

    def register(self, block: int, name: bytes) -> None:
        """Say what a block in use now holds. A content already held elsewhere keeps its first block."""
        if self._refs[block] == 0:
            raise RuntimeError(f"block {block} is not in use and cannot be registered")
        if not self.prefix_reuse or self._hash_of[block] is not None or name in self._block_of:
            return
        self._hash_of[block] = name
        self._block_of[name] = block
        self.counters.registered += 1

    def check(self) -> None:
        """Raise where the books do not add up: each block in one state, each name for one block."""
        free, kept = set(self._free), set(self._kept)
        used = {block for block, refs in enumerate(self._refs) if refs > 0}
        if len(free) != len(self._free) or len(free) + len(kept) + len(used) != self.num_blocks:
            counts = f"{len(self._free)} free, {len(kept)} kept, {len(used)} in use"
            raise RuntimeError(f"{counts}: that is not {self.num_blocks} blocks")
        if free | kept | used != set(range(self.num_blocks)) or min(self._refs, default=0) < 0:
            raise RuntimeError("a block is in two states or in none")
        named = {block: name for block, name in enumerate(self._hash_of) if name is not None}
        if {name: block for block, name in named.items()} != self._block_of:
            raise RuntimeError("the names of blocks and the blocks of names differ")
        if free & named.keys() or not kept <= named.keys():
            raise RuntimeError("a free block has a name, or a kept one has none")

    def _evict(self) -> int:
        block, _ = self._kept.popitem(last=False)
        name = self._hash_of[block]
        assert name is not None
        self._hash_of[block] = None
        del self._block_of[name]
        self.counters.evictions += 1
        return block
