"""What a step computes and how long it takes, as the planner sees it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from yalis.scheduling.plan import StepPlan


@dataclass(frozen=True)
class StepShape:
    """The work of one step, as far as its time depends on it: a StepPlan without tokens and KV blocks."""

    decodes: int = 0  # sequences that compute one token after their prompt
    decode_context: int = 0  # tokens that they attend to, the new one included, summed over the sequences
    chunks: tuple[tuple[int, int], ...] = ()  # of prompts: (first position, tokens)
    sampled: int = 0  # rows of logits

    @classmethod
    def of(cls, plan: StepPlan) -> StepShape:
        """A sequence that computes a single token at a position above 0 counts as decoding."""
        decodes = context = sampled = 0
        chunks: list[tuple[int, int]] = []
        for step in plan.sequences:
            count = len(step.tokens)
            sampled += step.samples
            if count == 1 and step.start:
                decodes += 1
                context += step.start + 1
            else:
                chunks.append((step.start, count))
        return cls(decodes, context, tuple(chunks), sampled)

    @property
    def tokens(self) -> int:
        return self.decodes + self.prompt_tokens

    @property
    def prompt_tokens(self) -> int:
        return sum(count for _, count in self.chunks)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on one rank, by category. `idle` is the time in which the device waits for its host."""

    matmul: float = 0.0
    attention: float = 0.0
    communication: float = 0.0
    other: float = 0.0
    idle: float = 0.0

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.communication + self.other + self.idle

    def __add__(self, other: StepTime) -> StepTime:
        return StepTime(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def scaled(self, factor: float) -> StepTime:
        return StepTime(*(getattr(self, one.name) * factor for one in fields(self)))


@dataclass(frozen=True)
class SimRequest:
    """A request on the virtual clock: lengths instead of tokens."""

    prompt_len: int
    output_len: int
    arrival: float = 0.0  # seconds
    tag: str = field(default="", compare=False)  # copied to the result
