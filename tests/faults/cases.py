"""The fault matrix: every fault, in every phase, split and rank, and the error output and exit status it must cause."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

PHASES = ("join", "connect", "load", "warm-up", "prefill", "decode", "shutdown")
MOMENTS = {"load": "loading"}  # phases that have another name in tests/multiprocess/fault.py
#: Phases that add only the faults after which another rank waits. The others are handled as while loading.
START_PHASES, START_FAULTS = ("connect", "warm-up"), ("kill", "exception", "sigstop", "hang")
_NOT_JOINED = "did not (arrive|reach|report|answer)|ended before"


@dataclass(frozen=True)
class Fault:
    """`action`: what tests/multiprocess/fault.py does in the rank; `reason`: pattern that the error must match."""

    action: str
    reason: str


FAULTS = {
    "kill": Fault("kill", f"died|killed|{_NOT_JOINED}"),
    "exception": Fault("raise", "RuntimeError: a bug"),
    "sigterm": Fault("term", "SIGTERM|exit status 143"),
    "memory": Fault("memory", "memory|MemoryError"),
    "sigstop": Fault("stop", f"stopped|has not (answered|responded)|{_NOT_JOINED}"),
    "hang": Fault("sleep", f"holds up|it hangs|{_NOT_JOINED}"),
    "link-down": Fault("pause", f"network|has not (answered|responded)|{_NOT_JOINED}"),
    "silent-host": Fault("pause", f"network|has not (answered|responded)|{_NOT_JOINED}"),
}
NETWORK_FAULTS = ("link-down", "silent-host")

SELF_STARTED, LAUNCHED, HOSTS = "self-started", "launched", "two hosts"


@dataclass(frozen=True)
class Split:
    """`start`: rank 0 starts rank 1, a launcher starts both on one host, or it starts one on each of two hosts."""

    name: str
    flags: tuple[str, str]
    start: str = SELF_STARTED


SPLITS = {
    split.name: split
    for split in (
        Split("tp2", ("--tp", "2")),
        Split("pp2", ("--pp", "2")),
        Split("dp2", ("--dp", "2")),
        Split("tp2-hosts", ("--tp", "2"), HOSTS),
        Split("tp2-launched", ("--tp", "2"), LAUNCHED),
        Split("pp2-launched", ("--pp", "2"), LAUNCHED),
        Split("dp2-launched", ("--dp", "2"), LAUNCHED),
    )
}


@dataclass(frozen=True)
class Case:
    """One job with one fault."""

    fault: str
    phase: str
    split: str
    rank: int

    def __str__(self) -> str:
        return f"{self.fault}-{self.phase}-{self.split}-rank{self.rank}"

    @property
    def start(self) -> str:
        return SPLITS[self.split].start

    @property
    def max_tokens(self) -> int:
        """Tokens per prompt: few if the fault comes at shutdown, else so many that no timeout outlasts the job."""
        return 8 if self.phase == "shutdown" else 200

    @property
    def by_network(self) -> bool:
        return self.fault in NETWORK_FAULTS

    @property
    def freeing_signal(self) -> str | None:
        """The signal to send to the faulty rank after all others have ended; None if it must have ended too.

        A stopped rank runs no code: rank 0 kills one that it started, and only the user can continue others. A rank
        that hangs before it has joined has no connection over which another rank could end it.
        """
        if self.rank and self.start == SELF_STARTED:
            return None
        if self.fault == "sigstop":
            return "SIGCONT"
        return "SIGTERM" if (self.fault, self.phase) == ("hang", "join") else None


def matrix() -> list[Case]:
    """Return all cases."""
    return [
        Case(fault, phase, split, rank)
        for fault, phase, split, rank in itertools.product(FAULTS, PHASES, SPLITS, (0, 1))
        if (fault not in NETWORK_FAULTS or SPLITS[split].start == HOSTS)
        and (phase not in START_PHASES or fault in START_FAULTS)
    ]


def cover() -> list[Case]:
    """Return a pairwise cover of the launched cases on one or two hosts, without network faults.

    Every pair of values of fault, phase, split and rank occurs. Greedy: adds the case with the most missing pairs; of
    equal cases, the one of the rank that has fewer. Self-started ranks are left out because they start slowly.
    """
    candidates = [case for case in matrix() if case.start != SELF_STARTED and not case.by_network]
    missing = {pair for case in candidates for pair in _pairs(case)}
    chosen: list[Case] = []
    while missing:
        ranks = [case.rank for case in chosen]
        best = max(candidates, key=lambda case: (len(missing & _pairs(case)), -ranks.count(case.rank)))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(case: Case) -> set[tuple[object, object]]:
    values = enumerate((case.fault, case.phase, case.split, case.rank))
    return set(itertools.combinations(values, 2))


def wrong_sentences(case: Case, completed: bool, errors: str) -> Iterator[str]:
    """Yield the problems of `errors`, the error output of all ranks in the order in which it was printed.

    `completed`: all results were printed, so the job need not report a fault that comes later.
    """
    if "Traceback" in errors:
        yield "a traceback was printed"
    sentences = error_sentences(errors)
    last = sentences[-1] if sentences else ""
    if case.by_network:  # each side reports the other one
        if not completed and not _has(sentences, 1, FAULTS[case.fault].reason):
            yield "rank 0 does not say that the network to rank 1 is down"
        if case.phase != "shutdown" and not _has(sentences, 0, FAULTS[case.fault].reason):
            yield "rank 1 does not say that the network to rank 0 is down"
        return
    if any(f"rank {1 - case.rank}" in sentence and f"rank {case.rank}" not in sentence for sentence in sentences):
        yield "another rank is blamed"
    if case.fault == "sigterm" and not case.rank:
        # Another rank reports that rank 0 has ended if it has not joined yet.
        if not completed and not any(one.startswith("yalis: stopped") for one in sentences):
            yield "no sentence says that the job was stopped"
        return
    if completed and not last:
        return
    if f"rank {case.rank}" not in last and (case.rank or "rank 1" in last):
        yield f"the last sentence does not name rank {case.rank}"
    reason = FAULTS[case.fault].reason
    if case.phase == "join":  # a rank that fails before it has joined prints the reason itself, if it can
        last = "\n".join(sentences)
        reason += f"|{_NOT_JOINED}" if case.fault == "sigterm" else ""
    if not re.search(reason, last):
        yield "the reason is not given"


def _has(sentences: list[str], rank: int, reason: str) -> bool:
    return any(f"rank {rank}" in sentence and re.search(reason, sentence) for sentence in sentences)


def error_sentences(errors: str) -> list[str]:
    """Return the lines in which yalis reports an error or that it was stopped, not those on how much was done."""
    return [
        line
        for line in errors.splitlines()
        if line.startswith("yalis") and not re.search(r"tokens/s$|^yalis: (\d+ tokens? of|nothing was generated)", line)
    ]


def wrong_statuses(case: Case, completed: bool, statuses: dict[int, int]) -> Iterator[str]:
    """Yield the wrong exit statuses. `statuses` has rank 0, and rank 1 unless rank 0 started it.

    `completed`: all results were printed.
    """
    own = {"kill": {-9}, "sigterm": {1, 143, -15} if case.rank else {143}}.get(case.fault, {1})
    if case.freeing_signal == "SIGTERM":
        own = {1, 143, -15}
    for rank, status in statuses.items():
        accepted = own if rank == case.rank else {1, 143} if case.fault == "sigterm" else {1}
        if completed or (case.phase == "shutdown" and rank):  # the work was done
            accepted = accepted | {0, 1}
        if status not in accepted:
            yield f"rank {rank} ended with status {status}"
