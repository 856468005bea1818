"""One sequence to be generated, and where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from yalis.cache.blocks import hash_block, root_hash
from yalis.types import FinishReason, SamplingParams


@dataclass(eq=False)
class Request:
    """Made by the engine, which may read it at any time; changed by the scheduler alone."""

    id: int
    prompt: Sequence[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()

    output: list[int] = field(default_factory=list, init=False)  # tokens that are sure
    finish_reason: FinishReason | None = field(default=None, init=False)
    cached_tokens: int = field(default=0, init=False)  # prompt tokens found in the cache when first admitted

    tokens: list[int] = field(init=False, repr=False)  # prompt and output: every token known on the host
    stop_ids: frozenset[int] = field(init=False, repr=False)
    arrival: int = field(default=-1, init=False)
    limit: int = field(default=0, init=False)  # the length at which it ends
    admissions: int = field(default=0, init=False)
    request_slot: int | None = field(default=None, init=False)  # None while it waits
    planned: int = field(default=0, init=False)  # positions computed by the plans made so far
    pending: int = field(default=0, init=False)  # tokens sampled by plans that are not committed
    outstanding: int = field(default=0, init=False)  # plans not committed that mention this request
    blocks: tuple[int, ...] = field(default=(), init=False, repr=False)
    registered: int = field(default=0, init=False)  # leading blocks whose content has a name
    long_rope: bool = field(default=False, init=False)
    hashes: list[bytes] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self.prompt = tuple(self.prompt)
        self.tokens = list(self.prompt)
        self.stop_ids = frozenset(self.params.stop_token_ids)
        if not self.params.ignore_eos:
            self.stop_ids |= self.eos_token_ids

    @property
    def length(self) -> int:
        """Tokens of the sequence, with those sampled but not committed."""
        return len(self.tokens) + self.pending

    def use_rope(self, long_rope: bool) -> None:
        """Keys rotated otherwise are other contents, so the names of its blocks begin anew."""
        if long_rope != self.long_rope:
            self.long_rope = long_rope
            self.hashes.clear()

    def block_hashes(self, block_size: int, count: int) -> list[bytes]:
        """The names of at least its first `count` blocks, all of known tokens; each is computed once."""
        while len(self.hashes) < count:
            parent = self.hashes[-1] if self.hashes else root_hash("long_rope" if self.long_rope else "")
            start = len(self.hashes) * block_size
            self.hashes.append(hash_block(parent, self.tokens[start : start + block_size]))
        return self.hashes

    def accept(self, token: int) -> FinishReason | None:
        """Append a sampled token, and say whether it ends the request."""
        self.output.append(token)
        self.tokens.append(token)
        if token in self.stop_ids and len(self.output) >= self.params.min_tokens:
            return "stop"
        return "length" if len(self.tokens) >= self.limit else None
