"""Follows the answers with structured outputs on a rank that samples, and returns which tokens may come next.

Every rank of the last pipeline stage has the history of these requests (SequenceStep.history) and computes the same
masks, so none is sent. A state belongs to a request slot and is built again from the history if another request had
the slot meanwhile, such as after a preemption.
"""

from __future__ import annotations

from dataclasses import dataclass

from yalis.log import get_logger
from yalis.sampling.grammar import Bits, GrammarCompiler, Matcher
from yalis.scheduling.plan import SequenceStep

log = get_logger(__name__)


@dataclass(frozen=True)
class _State:
    request_id: int
    matcher: Matcher


class GrammarStates:
    """The matchers of the requests of one runner."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._by_slot: dict[int, _State] = {}
        self.masks = 0  # computed so far
        self.rebuilt = 0  # states that were built from the history of a request that had tokens already

    def next_tokens(self, step: SequenceStep) -> Bits | None:
        """Return the tokens that may follow those of the step, as Matcher.next_tokens does; None: none can."""
        wanted = step.params.structured_outputs
        assert wanted is not None
        assert step.history is not None
        _, output = step.history
        state = self._by_slot.get(step.request_slot)
        if state is None or state.request_id != step.request_id or state.matcher.num_tokens > len(output):
            self.rebuilt += bool(output)
            state = _State(step.request_id, self._compiler.start(wanted, must_wait=True))
            self._by_slot[step.request_slot] = state
        matcher = state.matcher
        self.masks += 1
        allowed = matcher.next_tokens() if matcher.consume(list(output[matcher.num_tokens :])) else None
        if allowed is None:
            log.warning("request %d ends early: its grammar cannot continue (%s)", step.request_id, matcher.error)
        return allowed
