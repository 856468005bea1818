"""One sequence to be generated, and its state in the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from yalis.cache.blocks import hash_block, root_hash
from yalis.types import FinishReason, SamplingParams, TokenLogprobs


@dataclass(eq=False)
class Request:
    """Created by the engine, which may read it at any time. Only the scheduler changes it."""

    id: int
    prompt: Sequence[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()

    output: list[int] = field(default_factory=list, init=False)  # committed output tokens
    finish_reason: FinishReason | None = field(default=None, init=False)
    cached_tokens: int = field(default=0, init=False)  # prompt tokens found in the prefix cache at first admission

    #: of the prompt tokens after the first; as many as were computed so far
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, init=False, repr=False)

    tokens: list[int] = field(init=False, repr=False)  # prompt and output
    stop_ids: frozenset[int] = field(init=False, repr=False)
    generates: bool = field(init=False)  # False: only the prompt is scored
    needs_history: bool = field(init=False)  # as in SamplingParams
    plain: bool = field(
        init=False
    )  # it generates, from its last token alone and without log-probabilities of its prompt
    ends_early: bool = field(init=False)  # before min_tokens, where its grammar allows only EOS
    arrival: int = field(default=-1, init=False)  # order of arrival
    max_len: int = field(default=0, init=False)  # prompt and output tokens at which it ends
    num_admissions: int = field(default=0, init=False)
    request_slot: int | None = field(default=None, init=False)  # None while the request waits
    num_computed_tokens: int = field(default=0, init=False)  # including those that plans in flight compute
    num_pending_tokens: int = field(default=0, init=False)  # sampled by plans in flight, not committed
    num_plans_in_flight: int = field(default=0, init=False)  # plans in flight that contain this request
    blocks: tuple[int, ...] = field(default=(), init=False, repr=False)  # block table
    num_registered_blocks: int = field(default=0, init=False)  # leading blocks whose hash is in the prefix cache
    long_rope: bool = field(default=False, init=False)
    hashes: list[bytes] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self.prompt = tuple(self.prompt)
        self.tokens = list(self.prompt)
        self.generates = self.params.max_tokens > 0
        self.needs_history = self.params.needs_history
        self.plain = self.generates and not self.needs_history and self.params.prompt_logprobs is None
        self.ends_early = self.params.structured_outputs is not None
        self.stop_ids = frozenset(self.params.stop_token_ids)
        if not self.params.ignore_eos:
            self.stop_ids |= self.eos_token_ids

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence, including sampled ones that are not committed."""
        return len(self.tokens) + self.num_pending_tokens

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens were requested and are not all committed."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt) - 1

    def tokens_to_score(self, start: int, end: int) -> tuple[int, ...]:
        """Return the prompt tokens after positions start .. end - 1, if their log-probabilities are needed."""
        return tuple(self.prompt[start + 1 : end + 1]) if self.needs_prompt_logprobs else ()

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """Return the log-probabilities of the whole prompt; None if they came with an earlier output token."""
        return None if self.output else (None, *self.prompt_logprobs)

    def use_rope(self, long_rope: bool) -> None:
        """Choose the set of RoPE frequencies. Cached keys depend on it, so a change discards the block hashes."""
        if long_rope != self.long_rope:
            self.long_rope = long_rope
            self.hashes.clear()

    def block_hashes(self, block_size: int, count: int) -> list[bytes]:
        """Return the hashes of at least the first `count` blocks, which must be full. Each is computed once."""
        while len(self.hashes) < count:
            parent = self.hashes[-1] if self.hashes else root_hash("long_rope" if self.long_rope else "")
            start = len(self.hashes) * block_size
            self.hashes.append(hash_block(parent, self.tokens[start : start + block_size]))
        return self.hashes

    def append(self, token: int) -> FinishReason | None:
        """Append a sampled token; returns the finish reason if it ends the request."""
        self.output.append(token)
        self.tokens.append(token)
        if token in self.stop_ids and (len(self.output) >= self.params.min_tokens or self.ends_early):
            return "stop"
        return "length" if len(self.tokens) >= self.max_len else None
