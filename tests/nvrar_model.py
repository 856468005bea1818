"""A model of NVRAR's protocol, and three ways of looking for a schedule that breaks it.

Ranks run the same operations in the same order. An operation is a short program of sends and waits: reduce-scatter in
the node, recursive doubling between nodes (nodes beyond a power of two fold in and out), all-gather in the node. The
network is as bad as it may be: a word arrives whenever it likes, whatever was sent before or after it, and a put
between nodes reads its staging only as it arrives. Nothing is acknowledged and there is no barrier.

Rank r's input to operation k is one bit of its own, so a sum shows which inputs of which operation are in it.

- `explore` visits every reachable state (breadth first, so a trace it finds is a shortest one).
- `wander` follows random schedules, with slow ranks and slow links.
- `race` looks at one run only: every reuse of a memory cell must come after the last use of it by program order and
  messages alone. If that holds, no schedule can differ: the first word to go wrong would have to win such a race.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Nodes: TypeAlias = tuple[tuple[int, ...], ...]  # the ranks of each node
Protocol: TypeAlias = Literal["ll", "signal"]  # a flag in every word; or plain words, then one signal
PLAIN = -1  # where a flag would be, a word without one has bits that may look like any flag


@dataclass(frozen=True)
class Design:
    """What the protocol relies on. The defaults are the design; the other settings each leave something out."""

    buffers: int = 2  # receive buffers that operations alternate between
    staging: int = 2  # likewise, what puts read from
    slot_per_step: bool = True  # every step between nodes has its own slots
    flag_period: int | None = None  # flags repeat after so many operations; None: never
    buffers_per_group: bool = True
    counter_per_group: bool = True
    streams: int = 1  # operations go round these; those of one stream run one after another
    in_order: bool = True  # an operation begins after the one before it began, whatever their streams
    empty_takes_number: bool = False
    slots_per_protocol: bool = True  # words with flags and words without never meet in one cell
    # The rest are variants; the protocol holds in all of them.
    words: int = 1  # words of a message
    blocks: int = 1  # thread blocks of a rank, each with words of its own; an operation ends when all have ended


@dataclass(frozen=True)
class Operation:
    nodes: Nodes
    kind: Literal["all_reduce", "broadcast"] = "all_reduce"
    protocol: Protocol = "ll"
    shares: int | None = None  # how many shares have elements; None: all, 0: an empty operation

    @property
    def ranks(self) -> list[int]:
        return sorted(rank for node in self.nodes for rank in node)


def world(*sizes: int) -> Nodes:
    """Nodes of these many ranks, numbered in order: world(2, 1) is ((0, 1), (2,))."""
    ranks = iter(range(sum(sizes)))
    return tuple(tuple(next(ranks) for _ in range(size)) for size in sizes)


# ---- programs ----


class Enter(NamedTuple):
    op: int
    after: tuple[tuple[int, int], ...]  # (thread, instructions it must have done)
    inputs: tuple[int, ...]  # by share


class Send(NamedTuple):
    op: int
    what: str
    to: int
    share: int
    flag: int
    cells: tuple[int, ...]  # where the words go
    signal: int | None  # where the signal goes, if the words carry no flag
    staging: tuple[int, ...]  # what a put between nodes reads; empty: a store, which takes its value along


class Wait(NamedTuple):
    op: int
    what: str
    share: int
    flag: int
    cells: tuple[int, ...]
    signal: int | None
    adds: bool  # to this rank's own partial sum; otherwise it is the result


class Leave(NamedTuple):
    op: int
    want: tuple[int, ...]  # by share


Instruction: TypeAlias = Enter | Send | Wait | Leave


class Machine:
    """Every rank's programs for a list of operations under a design, and the memory cells they name."""

    def __init__(self, design: Design, operations: Sequence[Operation]) -> None:
        self.design, self.operations = design, operations
        self.cells: dict[tuple[object, ...], int] = {}
        ranks = sorted({rank for op in operations for rank in op.ranks})
        self.owner = [(rank, stream, block) for rank in ranks
                      for stream in range(design.streams) for block in range(design.blocks)]  # fmt: skip
        self.programs: list[list[Instruction]] = [[] for _ in self.owner]
        for rank in ranks:
            self._write_programs(rank)

    def _write_programs(self, rank: int) -> None:
        design = self.design
        numbers: dict[object, int] = {}
        mine = [t for t, (owner, _, _) in enumerate(self.owner) if owner == rank]
        began: tuple[tuple[int, int], ...] = ()
        order = 0
        for index, op in enumerate(self.operations):
            if rank not in op.ranks or (op.shares == 0 and not design.empty_takes_number):
                continue
            counter = op.nodes if design.counter_per_group else "the rank's"
            numbers[counter] = number = numbers.get(counter, 0) + 1
            threads = [t for t in mine if self.owner[t][1] == order % design.streams]
            after = tuple((t, len(self.programs[t])) for t in threads) + (began if design.in_order else ())
            began = tuple((t, len(self.programs[t]) + 1) for t in threads)
            order += 1
            for t in threads:
                body = _Body(self, op, index, number, rank, self.owner[t][2])
                self.programs[t] += [Enter(index, after, body.inputs), *body.instructions(), Leave(index, body.want)]

    def cell(self, *key: object) -> int:
        return self.cells.setdefault(key, len(self.cells))

    def bit(self, op: int, rank: int) -> int:
        """Rank's input to an operation."""
        return 1 << (len(self.owner) * op + rank)

    def belongs(self, op: int, value: int) -> bool:
        """Whether a sum holds inputs of this operation only."""
        return value >> (len(self.owner) * (op + 1)) == 0 and value % self.bit(op, 0) == 0


@dataclass
class _Body:
    """One thread block's part of one operation on one rank."""

    machine: Machine
    op: Operation
    index: int
    number: int
    rank: int
    block: int

    def __post_init__(self) -> None:
        self.node = next(n for n, ranks in enumerate(self.op.nodes) if self.rank in ranks)
        self.peers = [rank for rank in self.op.nodes[self.node] if rank != self.rank]
        owners = min(len(ranks) for ranks in self.op.nodes)  # on a larger node the ranks beyond own no share
        self.shares = range(owners if self.op.shares is None else self.op.shares)
        bits = [self.machine.bit(self.index, rank) for rank in self.op.ranks]
        self.inputs = (self.machine.bit(self.index, self.rank),) * len(self.shares)
        self.want = (bits[0] if self.op.kind == "broadcast" else sum(bits),) * len(self.shares)

    def instructions(self) -> Iterator[Instruction]:
        if self.op.kind == "broadcast":
            yield from self._broadcast()
            return
        own = [share for share in self.shares if self._owner(self.node, share) == self.rank]
        others = [share for share in self.shares if share not in own]
        for share in others:
            yield self._send(f"input {share} of rank {self.rank}", self._owner(self.node, share), share)
        for share in own:
            for peer in self.peers:
                yield self._wait(f"input {share} of rank {peer}", share)
        for share in own:
            yield from self._between_nodes(share)
            for peer in self.peers:
                yield self._send(f"sum {share}", peer, share)
        for share in others:
            yield self._wait(f"sum {share}", share, adds=False)

    def _between_nodes(self, share: int) -> Iterator[Instruction]:
        nodes = len(self.op.nodes)
        core = 1 << (nodes.bit_length() - 1)  # the largest power of two
        if self.node >= core:
            yield self._send(f"fold-in of sum {share}", self._owner(self.node - core, share), share)
            yield self._wait(f"fold-out of sum {share}", share, adds=False)
            return
        folds = self.node + core < nodes
        if folds:
            yield self._wait(f"fold-in of sum {share}", share)
        for step in range(core.bit_length() - 1):
            yield self._send(f"step {step} of sum {share}", self._owner(self.node ^ 1 << step, share), share)
            yield self._wait(f"step {step} of sum {share}", share)
        if folds:
            yield self._send(f"fold-out of sum {share}", self._owner(self.node + core, share), share)

    def _broadcast(self) -> Iterator[Instruction]:
        source, *others = self.op.ranks
        for share in self.shares:
            if self.rank == source:
                for rank in others:
                    yield self._send(f"copy {share}", rank, share)
            else:
                yield self._wait(f"copy {share}", share, adds=False)

    def _owner(self, node: int, share: int) -> int:
        """The rank of a node that reduces a share."""
        return self.op.nodes[node][share]

    @property
    def _flag(self) -> int:
        period = self.machine.design.flag_period
        return self.number if period is None else self.number % period

    def _slots(self, rank: int, what: str) -> tuple[tuple[int, ...], int | None]:
        """The cells of a message in the receiver's memory, and that of its signal."""
        design = self.machine.design
        group = self.op.nodes if design.buffers_per_group else "shared"
        slot = what if design.slot_per_step else re.sub(r"step \d", "any step", what)
        protocol = self.op.protocol if design.slots_per_protocol else "either"
        key = (rank, group, self.number % design.buffers, slot, protocol, self.block)
        cells = tuple(self.machine.cell(*key, word) for word in range(design.words))
        return cells, self.machine.cell(*key, "signal") if self.op.protocol == "signal" else None

    def _send(self, what: str, to: int, share: int) -> Send:
        design = self.machine.design
        cells, signal = self._slots(to, what)
        group = self.op.nodes if design.buffers_per_group else "shared"
        key = ("staging", self.rank, group, self.number % design.staging, what, to, self.op.protocol, self.block)
        words = () if to in self.peers else range(design.words)
        staging = tuple(self.machine.cell(*key, word) for word in words)
        return Send(self.index, what, to, share, self._flag, cells, signal, staging)

    def _wait(self, what: str, share: int, adds: bool = True) -> Wait:
        return Wait(self.index, what, share, self._flag, *self._slots(self.rank, what), adds)


# ---- running ----


class Word(NamedTuple):
    flag: int
    value: int
    unread: bool


class Flying(NamedTuple):
    """A word on its way, from the instruction (thread, pc) that sent it."""

    sent_by: tuple[int, int]
    cell: int
    staging: int | None  # read on arrival
    word: Word | None  # taken along
    last: bool  # a signal: arrives after the words of its put


class State(NamedTuple):
    pcs: tuple[int, ...]
    sums: tuple[tuple[int, ...], ...]  # each thread's partial sums by share
    memory: tuple[Word | None, ...]
    network: frozenset[Flying]


Event: TypeAlias = tuple[bool, int, int]  # (whether it is the arrival of what was sent, thread, pc)


class Broken(Exception):
    """A schedule on which the protocol fails."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(f"{kind}: {why}")
        self.kind = kind
        self.trace: list[str] = []

    def __str__(self) -> str:
        return "\n  ".join([super().__str__(), *self.trace])


def start(machine: Machine, events: list[Event]) -> State:
    threads = len(machine.programs)
    empty = State((0,) * threads, ((),) * threads, (None,) * len(machine.cells), frozenset())
    return _settle(machine, empty, range(threads), events)


def moves(machine: Machine, state: State) -> list[Flying | int]:
    """What can happen next: a word arrives, or a thread reads what it waits for."""
    waiting = {word.sent_by for word in state.network if not word.last}
    flying = sorted(state.network, key=lambda word: (word.sent_by, word.cell))
    found: list[Flying | int] = [word for word in flying if not (word.last and word.sent_by in waiting)]
    for thread, pc in enumerate(state.pcs):
        program = machine.programs[thread]
        if pc < len(program) and isinstance(wait := program[pc], Wait):
            polled = wait.cells if wait.signal is None else (wait.signal,)
            words = [state.memory[cell] for cell in polled]
            if all(word is not None and word.flag in (wait.flag, PLAIN) for word in words):
                found.append(thread)
    return found


def make(machine: Machine, state: State, move: Flying | int, events: list[Event]) -> State:
    """The state after a move and after everything that then follows without a choice; appends what happened."""
    if isinstance(move, Flying):
        events.append((True, *move.sent_by))
        return _arrive(state, move)
    events.append((False, move, state.pcs[move]))
    return _read(machine, state, move, events)


def _arrive(state: State, move: Flying) -> State:
    memory = list(state.memory)
    word = memory[move.staging] if move.staging is not None else move.word
    there = memory[move.cell]
    assert word is not None
    if there is not None and there.unread:
        raise Broken("overwrite", "the word lands on another that has not been read")
    memory[move.cell] = word
    return state._replace(memory=tuple(memory), network=state.network - {move})


def _read(machine: Machine, state: State, thread: int, events: list[Event]) -> State:
    pc = state.pcs[thread]
    wait = machine.programs[thread][pc]
    assert isinstance(wait, Wait)
    memory, sums = list(state.memory), list(state.sums[thread])
    values = set()
    for cell in wait.cells:
        word = memory[cell]
        if word is None or not machine.belongs(wait.op, word.value):
            raise Broken("stale read", "what it reads is of another operation")
        values.add(word.value)
        memory[cell] = word._replace(unread=False)
    if wait.signal is not None and (signal := memory[wait.signal]) is not None:
        memory[wait.signal] = signal._replace(unread=False)
    if len(values) > 1:
        raise Broken("stale read", "what it reads are words of different sums")
    sums[wait.share] = values.pop() + (sums[wait.share] if wait.adds else 0)
    pcs = (*state.pcs[:thread], pc + 1, *state.pcs[thread + 1 :])
    all_sums = (*state.sums[:thread], tuple(sums), *state.sums[thread + 1 :])
    state = State(pcs, all_sums, tuple(memory), state.network)
    rank = machine.owner[thread][0]
    return _settle(machine, state, [t for t, (owner, _, _) in enumerate(machine.owner) if owner == rank], events)


def _settle(machine: Machine, state: State, threads: Sequence[int], events: list[Event]) -> State:
    """Run these threads (all of a rank's, or more) up to their next wait.

    No choice is lost by doing so at once: a send touches only the rank's own staging, which nobody else writes, and
    the words that may still be read from there make it fail now or never.
    """
    pcs, sums, memory, network = list(state.pcs), list(state.sums), list(state.memory), set(state.network)
    going = True
    while going:
        going = False
        for t in threads:
            while pcs[t] < len(machine.programs[t]):
                here = machine.programs[t][pcs[t]]
                if isinstance(here, Wait) or (isinstance(here, Enter) and any(pcs[o] < n for o, n in here.after)):
                    break
                events.append((False, t, pcs[t]))
                if isinstance(here, Enter):
                    sums[t] = here.inputs
                elif isinstance(here, Leave):
                    if sums[t] != here.want:
                        raise Broken("wrong sum", "the result is not the sum of every rank's input")
                else:
                    _issue(here, (t, pcs[t]), sums[t][here.share], memory, network)
                pcs[t] += 1
                going = True
    return State(tuple(pcs), tuple(sums), tuple(memory), frozenset(network))


def _issue(send: Send, me: tuple[int, int], value: int, memory: list[Word | None], network: set[Flying]) -> None:
    word = Word(send.flag if send.signal is None else PLAIN, value, True)
    for i, cell in enumerate(send.cells):
        staging = send.staging[i] if send.staging else None
        if staging is not None:
            if any(flying.staging == staging for flying in network):
                raise Broken("overwrite", "it writes staging that an earlier put has yet to read")
            memory[staging] = word
        network.add(Flying(me, cell, staging, None if send.staging else word, False))
    if send.signal is not None:
        network.add(Flying(me, send.signal, None, Word(send.flag, 0, True), True))


def _tell(machine: Machine, event: Event) -> str:
    arrival, thread, pc = event
    rank, _, block = machine.owner[thread]
    who = f"rank {rank}" + (f" block {block}" if machine.design.blocks > 1 else "")
    here = machine.programs[thread][pc]
    operation = f"operation {here.op + 1}"
    if isinstance(here, Send):
        verb = "arrives from" if arrival else "is sent by"
        return f"{operation}: {here.what} {verb} {who} {'at' if arrival else 'to'} rank {here.to}"
    if isinstance(here, Wait):
        return f"{operation}: {here.what} is read by {who}"
    return f"{operation}: {who} {'enters' if isinstance(here, Enter) else 'leaves'}"


# ---- looking for trouble ----


def explore(machine: Machine) -> int:
    """Visit every reachable state; how many there are. Raises Broken with a shortest schedule that fails."""
    events: list[Event] = []
    first = start(machine, events)
    came_from: dict[State, tuple[State | None, list[Event]]] = {first: (None, events)}
    queue = deque([first])
    while queue:
        state = queue.popleft()
        events = []
        try:
            choices = moves(machine, state)
            if not choices:
                _check_end(machine, state)
            for move in choices:
                events = []
                after = make(machine, state, move, events)
                if after not in came_from:
                    came_from[after] = (state, events)
                    queue.append(after)
        except Broken as broken:
            at: State | None = state
            while at is not None:
                at, before = came_from[at]
                events[:0] = before
            broken.trace = [_tell(machine, event) for event in events]
            raise
    return len(came_from)


def wander(machine: Machine, seed: int) -> None:
    """One random schedule. Some threads and some words are much slower than others, so ranks drift far apart."""
    dice = random.Random(seed)
    pace = [dice.expovariate(1) ** 3 + 1e-6 for _ in machine.programs]
    links: dict[tuple[int, int], float] = {}
    events: list[Event] = []
    state = start(machine, events)
    try:
        while choices := moves(machine, state):
            weights = [
                pace[move] if isinstance(move, int)
                else links.setdefault((move.sent_by[0], move.cell), dice.expovariate(1) ** 3 + 1e-6)
                for move in choices
            ]  # fmt: skip
            state = make(machine, state, dice.choices(choices, weights)[0], events)
        _check_end(machine, state)
    except Broken as broken:
        broken.trace = [_tell(machine, event) for event in events]
        raise


def _check_end(machine: Machine, state: State) -> None:
    for t, (pc, program) in enumerate(zip(state.pcs, machine.programs, strict=True)):
        if pc < len(program):
            raise Broken("deadlock", f"rank {machine.owner[t][0]} waits for what never comes")


def race(machine: Machine) -> str | None:
    """The first reuse of a cell that program order and messages do not put behind its last use; None if there is none.

    A message is known to have been delivered only where it is read, so a slot and the staging of a put are both in use
    until the wait for it. Two words in a row that look alike are no better: the second wait may take the first word.
    """
    sends = {_message(machine, t, pc): (t, pc) for t, pc, here in _instructions(machine) if isinstance(here, Send)}
    waits = {_message(machine, t, pc): (t, pc) for t, pc, here in _instructions(machine) if isinstance(here, Wait)}
    order: list[tuple[int, int]] = []  # one run
    past: dict[
        tuple[int, int], int
    ] = {}  # as bits: where an instruction stands in `order`, and all that it must follow

    def follow(t: int, pc: int) -> list[tuple[int, int]] | None:
        """What an instruction directly follows; None if that has not happened yet."""
        here = machine.programs[t][pc]
        after = [(t, pc - 1)] if pc else []
        if isinstance(here, Enter):
            after += [(o, n - 1) for o, n in here.after if n]
        elif isinstance(here, Wait):
            after.append(sends[_message(machine, t, pc)])
        return after if all(one in past for one in after) else None

    pcs = [0] * len(machine.programs)
    going = True
    while going:
        going = False
        for t, program in enumerate(machine.programs):
            while pcs[t] < len(program) and (after := follow(t, pcs[t])) is not None:
                past[t, pcs[t]] = 1 << len(order)
                for one in after:
                    past[t, pcs[t]] |= past[one]
                order.append((t, pcs[t]))
                pcs[t] += 1
                going = True
    used: dict[int, tuple[int, int]] = {}  # a cell's last send
    for t, pc in order:
        send = machine.programs[t][pc]
        if not isinstance(send, Send):
            continue
        wait = machine.programs[(at := waits[_message(machine, t, pc)])[0]][at[1]]
        assert isinstance(wait, Wait)
        if (wait.flag, wait.cells, wait.signal) != (send.flag, send.cells, send.signal):
            return f"with another flag or slot than was sent, {_tell(machine, (False, *at))}"
        for cell in (*send.cells, *send.staging):
            if cell in used:
                last = machine.programs[used[cell][0]][used[cell][1]]
                assert isinstance(last, Send)
                read = past[waits[_message(machine, *used[cell])]]
                alike = last.flag == send.flag or (last.signal is None) != (send.signal is None)
                if past[t, pc] & read != read or (alike and cell in send.cells):
                    return f"unordered: {_tell(machine, (False, t, pc))}; {_tell(machine, (False, *used[cell]))}"
            used[cell] = (t, pc)
    return None if len(order) == sum(map(len, machine.programs)) else "deadlock"


def _instructions(machine: Machine) -> Iterator[tuple[int, int, Instruction]]:
    for t, program in enumerate(machine.programs):
        for pc, here in enumerate(program):
            yield t, pc, here


def _message(machine: Machine, thread: int, pc: int) -> tuple[int, str, int, int]:
    """What a send and the wait for it have in common: the operation, what it is, who receives it, which block."""
    here, (rank, _, block) = machine.programs[thread][pc], machine.owner[thread]
    assert isinstance(here, Send | Wait)
    return here.op, here.what, here.to if isinstance(here, Send) else rank, block
