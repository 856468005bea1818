"""A model of NVRAR's protocol, and three methods to search for a schedule that breaks it.

Ranks run the same operations in the same order. An operation is a short program of sends and waits: intra-node
reduce-scatter, inter-node recursive doubling (nodes beyond a power of two fold in and out), intra-node all-gather. The
network is adversarial: every word arrives at any time, in any order, and a put between nodes reads its staging buffer
only when it arrives. There are no acknowledgements and no barriers.

The input of rank r to operation k is a unique bit, so a sum shows which inputs of which operation it contains.

- `explore` visits every reachable state, breadth first, so the trace of a failure is a shortest one.
- `random_walk` follows one random schedule, with slow ranks and slow links.
- `find_race` looks at one run: every reuse of a memory cell must be ordered after its last use by program order and
  messages alone. If that holds, no schedule can fail, because the first wrong word would have to win such a race.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Nodes: TypeAlias = tuple[tuple[int, ...], ...]  # the ranks of each node
Protocol: TypeAlias = Literal["ll", "signal"]  # a flag in every word; or words without flags, then a signal
PLAIN = -1  # the flag of a word without one: its bits may look like any flag


@dataclass(frozen=True)
class Design:
    """The properties the protocol relies on. The defaults are the real design; every other value removes one."""

    buffers: int = 2  # sets of receive buffers that operations alternate between
    staging: int = 2  # sets of staging buffers, the sources of puts
    slot_per_step: bool = True  # every inter-node step has its own slots
    flag_period: int | None = None  # flags repeat after this many operations; None: never
    buffers_per_group: bool = True
    counter_per_group: bool = True
    streams: int = 1  # operations use these in turn; those of one stream run one after another
    in_order: bool = True  # an operation starts after its predecessor has started, on any stream
    empty_uses_sequence: bool = False
    slots_per_protocol: bool = True  # words with flags and words without never use the same cell
    # Variants in which the protocol holds:
    words: int = 1  # words per message
    blocks: int = 1  # thread blocks per rank, each with its own words; an operation ends when all have ended


@dataclass(frozen=True)
class Operation:
    nodes: Nodes
    kind: Literal["all_reduce", "broadcast"] = "all_reduce"
    protocol: Protocol = "ll"
    shards: int | None = None  # number of non-empty shards; None: all, 0: an empty operation

    @property
    def ranks(self) -> list[int]:
        return sorted(rank for node in self.nodes for rank in node)


def world(*sizes: int) -> Nodes:
    """Return nodes with these numbers of ranks: world(2, 1) is ((0, 1), (2,))."""
    ranks = iter(range(sum(sizes)))
    return tuple(tuple(next(ranks) for _ in range(size)) for size in sizes)


# ---- programs ----


class Enter(NamedTuple):
    op: int
    after: tuple[tuple[int, int], ...]  # (thread, number of instructions it must have executed)
    inputs: tuple[int, ...]  # per shard


class Send(NamedTuple):
    op: int
    what: str
    to: int
    shard: int
    flag: int
    cells: tuple[int, ...]  # destination of the words
    signal: int | None  # destination of the signal, if the words have no flags
    staging: tuple[int, ...]  # source of a put between nodes; empty for a store, which carries its value


class Wait(NamedTuple):
    op: int
    what: str
    shard: int
    flag: int
    cells: tuple[int, ...]
    signal: int | None
    adds: bool  # add to this rank's partial sum; else it is the final result


class Leave(NamedTuple):
    op: int
    expected: tuple[int, ...]  # per shard


Instruction: TypeAlias = Enter | Send | Wait | Leave


class Machine:
    """The programs of all ranks for a list of operations under a design, and the memory cells they use."""

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
        sequences: dict[object, int] = {}
        own_threads = [t for t, (owner, _, _) in enumerate(self.owner) if owner == rank]
        started: tuple[tuple[int, int], ...] = ()
        order = 0
        for index, op in enumerate(self.operations):
            if rank not in op.ranks or (op.shards == 0 and not design.empty_uses_sequence):
                continue
            counter = op.nodes if design.counter_per_group else "shared"
            sequences[counter] = sequence = sequences.get(counter, 0) + 1
            threads = [t for t in own_threads if self.owner[t][1] == order % design.streams]
            after = tuple((t, len(self.programs[t])) for t in threads) + (started if design.in_order else ())
            started = tuple((t, len(self.programs[t]) + 1) for t in threads)
            order += 1
            for t in threads:
                body = _BlockProgram(self, op, index, sequence, rank, self.owner[t][2])
                self.programs[t] += [
                    Enter(index, after, body.inputs),
                    *body.instructions(),
                    Leave(index, body.expected),
                ]

    def cell(self, *key: object) -> int:
        return self.cells.setdefault(key, len(self.cells))

    def bit(self, op: int, rank: int) -> int:
        """Return the input of a rank to an operation."""
        return 1 << (len(self.owner) * op + rank)

    def belongs(self, op: int, value: int) -> bool:
        """Return whether a sum contains only inputs of this operation."""
        return value >> (len(self.owner) * (op + 1)) == 0 and value % self.bit(op, 0) == 0


@dataclass
class _BlockProgram:
    """The program of one thread block of one rank for one operation."""

    machine: Machine
    op: Operation
    index: int
    sequence: int
    rank: int
    block: int

    def __post_init__(self) -> None:
        self.node = next(n for n, ranks in enumerate(self.op.nodes) if self.rank in ranks)
        self.local_peers = [rank for rank in self.op.nodes[self.node] if rank != self.rank]
        owners = min(len(ranks) for ranks in self.op.nodes)  # on larger nodes, the remaining ranks own no shard
        self.shards = range(owners if self.op.shards is None else self.op.shards)
        bits = [self.machine.bit(self.index, rank) for rank in self.op.ranks]
        self.inputs = (self.machine.bit(self.index, self.rank),) * len(self.shards)
        self.expected = (bits[0] if self.op.kind == "broadcast" else sum(bits),) * len(self.shards)

    def instructions(self) -> Iterator[Instruction]:
        if self.op.kind == "broadcast":
            yield from self._broadcast()
            return
        own = [shard for shard in self.shards if self._owner(self.node, shard) == self.rank]
        others = [shard for shard in self.shards if shard not in own]
        for shard in others:
            yield self._send(f"input {shard} of rank {self.rank}", self._owner(self.node, shard), shard)
        for shard in own:
            for peer in self.local_peers:
                yield self._wait(f"input {shard} of rank {peer}", shard)
        for shard in own:
            yield from self._inter_node(shard)
            for peer in self.local_peers:
                yield self._send(f"sum {shard}", peer, shard)
        for shard in others:
            yield self._wait(f"sum {shard}", shard, adds=False)

    def _inter_node(self, shard: int) -> Iterator[Instruction]:
        nodes = len(self.op.nodes)
        core = 1 << (nodes.bit_length() - 1)  # the largest power of two
        if self.node >= core:
            yield self._send(f"fold-in of sum {shard}", self._owner(self.node - core, shard), shard)
            yield self._wait(f"fold-out of sum {shard}", shard, adds=False)
            return
        folds = self.node + core < nodes
        if folds:
            yield self._wait(f"fold-in of sum {shard}", shard)
        for step in range(core.bit_length() - 1):
            yield self._send(f"step {step} of sum {shard}", self._owner(self.node ^ 1 << step, shard), shard)
            yield self._wait(f"step {step} of sum {shard}", shard)
        if folds:
            yield self._send(f"fold-out of sum {shard}", self._owner(self.node + core, shard), shard)

    def _broadcast(self) -> Iterator[Instruction]:
        source, *others = self.op.ranks
        for shard in self.shards:
            if self.rank == source:
                for rank in others:
                    yield self._send(f"copy {shard}", rank, shard)
            else:
                yield self._wait(f"copy {shard}", shard, adds=False)

    def _owner(self, node: int, shard: int) -> int:
        """Return the rank of a node that reduces a shard."""
        return self.op.nodes[node][shard]

    @property
    def _flag(self) -> int:
        period = self.machine.design.flag_period
        return self.sequence if period is None else self.sequence % period

    def _slots(self, rank: int, what: str) -> tuple[tuple[int, ...], int | None]:
        """Return the cells of a message in the memory of `rank`, and the cell of its signal."""
        design = self.machine.design
        group = self.op.nodes if design.buffers_per_group else "shared"
        slot = what if design.slot_per_step else re.sub(r"step \d", "any step", what)
        protocol = self.op.protocol if design.slots_per_protocol else "either"
        key = (rank, group, self.sequence % design.buffers, slot, protocol, self.block)
        cells = tuple(self.machine.cell(*key, word) for word in range(design.words))
        return cells, self.machine.cell(*key, "signal") if self.op.protocol == "signal" else None

    def _send(self, what: str, to: int, shard: int) -> Send:
        design = self.machine.design
        cells, signal = self._slots(to, what)
        group = self.op.nodes if design.buffers_per_group else "shared"
        key = ("staging", self.rank, group, self.sequence % design.staging, what, to, self.op.protocol, self.block)
        words = () if to in self.local_peers else range(design.words)
        staging = tuple(self.machine.cell(*key, word) for word in words)
        return Send(self.index, what, to, shard, self._flag, cells, signal, staging)

    def _wait(self, what: str, shard: int, adds: bool = True) -> Wait:
        return Wait(self.index, what, shard, self._flag, *self._slots(self.rank, what), adds)


# ---- running ----


class Word(NamedTuple):
    flag: int
    value: int
    unread: bool


class InFlight(NamedTuple):
    """A word in flight, sent by the instruction (thread, pc)."""

    sent_by: tuple[int, int]
    cell: int
    staging: int | None  # cell that a put reads on arrival
    word: Word | None  # value that a store carries
    last: bool  # a signal, which arrives after the words of its put


class State(NamedTuple):
    pcs: tuple[int, ...]
    sums: tuple[tuple[int, ...], ...]  # partial sums of each thread, per shard
    memory: tuple[Word | None, ...]
    network: frozenset[InFlight]


Event: TypeAlias = tuple[bool, int, int]  # (is the arrival of what the instruction sent, thread, pc)


class ProtocolError(Exception):
    """The protocol fails; `trace` is the schedule that leads there."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(f"{kind}: {why}")
        self.kind = kind
        self.trace: list[str] = []

    def __str__(self) -> str:
        return "\n  ".join([super().__str__(), *self.trace])


def start(machine: Machine, events: list[Event]) -> State:
    threads = len(machine.programs)
    empty = State((0,) * threads, ((),) * threads, (None,) * len(machine.cells), frozenset())
    return _run_to_next_waits(machine, empty, range(threads), events)


def enabled_moves(machine: Machine, state: State) -> list[InFlight | int]:
    """Return the possible next moves: a word arrives, or a thread reads the message it waits for."""
    waiting = {word.sent_by for word in state.network if not word.last}
    in_flight = sorted(state.network, key=lambda word: (word.sent_by, word.cell))
    found: list[InFlight | int] = [word for word in in_flight if not (word.last and word.sent_by in waiting)]
    for thread, pc in enumerate(state.pcs):
        program = machine.programs[thread]
        if pc < len(program) and isinstance(wait := program[pc], Wait):
            polled = wait.cells if wait.signal is None else (wait.signal,)
            words = [state.memory[cell] for cell in polled]
            if all(word is not None and word.flag in (wait.flag, PLAIN) for word in words):
                found.append(thread)
    return found


def apply(machine: Machine, state: State, move: InFlight | int, events: list[Event]) -> State:
    """Return the state after a move and all deterministic instructions that follow. Appends the events."""
    if isinstance(move, InFlight):
        events.append((True, *move.sent_by))
        return _arrive(state, move)
    events.append((False, move, state.pcs[move]))
    return _read(machine, state, move, events)


def _arrive(state: State, move: InFlight) -> State:
    memory = list(state.memory)
    word = memory[move.staging] if move.staging is not None else move.word
    previous = memory[move.cell]
    assert word is not None
    if previous is not None and previous.unread:
        raise ProtocolError("overwrite", "a word overwrites another that has not been read")
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
            raise ProtocolError("stale read", "a read returns data of another operation")
        values.add(word.value)
        memory[cell] = word._replace(unread=False)
    if wait.signal is not None and (signal := memory[wait.signal]) is not None:
        memory[wait.signal] = signal._replace(unread=False)
    if len(values) > 1:
        raise ProtocolError("stale read", "a read returns words of different sums")
    sums[wait.shard] = values.pop() + (sums[wait.shard] if wait.adds else 0)
    pcs = (*state.pcs[:thread], pc + 1, *state.pcs[thread + 1 :])
    all_sums = (*state.sums[:thread], tuple(sums), *state.sums[thread + 1 :])
    state = State(pcs, all_sums, tuple(memory), state.network)
    rank = machine.owner[thread][0]
    return _run_to_next_waits(
        machine, state, [t for t, (owner, _, _) in enumerate(machine.owner) if owner == rank], events
    )


def _run_to_next_waits(machine: Machine, state: State, threads: Sequence[int], events: list[Event]) -> State:
    """Run these threads (all threads of a rank, or more) up to their next wait.

    Running them at once loses no interleaving: a send writes only the rank's own staging, which no other rank writes.
    Whether words that still have to be read from there are overwritten does not depend on the order.
    """
    pcs, sums, memory, network = list(state.pcs), list(state.sums), list(state.memory), set(state.network)
    progress = True
    while progress:
        progress = False
        for t in threads:
            while pcs[t] < len(machine.programs[t]):
                instruction = machine.programs[t][pcs[t]]
                if isinstance(instruction, Wait) or (
                    isinstance(instruction, Enter) and any(pcs[o] < n for o, n in instruction.after)
                ):
                    break
                events.append((False, t, pcs[t]))
                if isinstance(instruction, Enter):
                    sums[t] = instruction.inputs
                elif isinstance(instruction, Leave):
                    if sums[t] != instruction.expected:
                        raise ProtocolError("wrong sum", "the result is not the sum of every rank's input")
                else:
                    _issue(instruction, (t, pcs[t]), sums[t][instruction.shard], memory, network)
                pcs[t] += 1
                progress = True
    return State(tuple(pcs), tuple(sums), tuple(memory), frozenset(network))


def _issue(send: Send, sender: tuple[int, int], value: int, memory: list[Word | None], network: set[InFlight]) -> None:
    word = Word(send.flag if send.signal is None else PLAIN, value, True)
    for i, cell in enumerate(send.cells):
        staging = send.staging[i] if send.staging else None
        if staging is not None:
            if any(word.staging == staging for word in network):
                raise ProtocolError("overwrite", "a send overwrites staging that an earlier put has yet to read")
            memory[staging] = word
        network.add(InFlight(sender, cell, staging, None if send.staging else word, False))
    if send.signal is not None:
        network.add(InFlight(sender, send.signal, None, Word(send.flag, 0, True), True))


def _describe(machine: Machine, event: Event) -> str:
    arrival, thread, pc = event
    rank, _, block = machine.owner[thread]
    who = f"rank {rank}" + (f" block {block}" if machine.design.blocks > 1 else "")
    instruction = machine.programs[thread][pc]
    operation = f"operation {instruction.op + 1}"
    if isinstance(instruction, Send):
        verb = "arrives from" if arrival else "is sent by"
        return f"{operation}: {instruction.what} {verb} {who} {'at' if arrival else 'to'} rank {instruction.to}"
    if isinstance(instruction, Wait):
        return f"{operation}: {instruction.what} is read by {who}"
    return f"{operation}: {who} {'enters' if isinstance(instruction, Enter) else 'leaves'}"


# ---- searching for failures ----


def explore(machine: Machine) -> int:
    """Visit every reachable state and return their number. Raises ProtocolError with a shortest failing schedule."""
    events: list[Event] = []
    first = start(machine, events)
    came_from: dict[State, tuple[State | None, list[Event]]] = {first: (None, events)}
    queue = deque([first])
    while queue:
        state = queue.popleft()
        events = []
        try:
            choices = enabled_moves(machine, state)
            if not choices:
                _check_end(machine, state)
            for move in choices:
                events = []
                after = apply(machine, state, move, events)
                if after not in came_from:
                    came_from[after] = (state, events)
                    queue.append(after)
        except ProtocolError as failure:
            current: State | None = state
            while current is not None:
                current, earlier = came_from[current]
                events[:0] = earlier
            failure.trace = [_describe(machine, event) for event in events]
            raise
    return len(came_from)


def random_walk(machine: Machine, seed: int) -> None:
    """Follow one random schedule. Some threads and links are much slower than others, so ranks drift far apart."""
    rng = random.Random(seed)
    speed = [rng.expovariate(1) ** 3 + 1e-6 for _ in machine.programs]
    links: dict[tuple[int, int], float] = {}
    events: list[Event] = []
    state = start(machine, events)
    try:
        while choices := enabled_moves(machine, state):
            weights = [
                speed[move] if isinstance(move, int)
                else links.setdefault((move.sent_by[0], move.cell), rng.expovariate(1) ** 3 + 1e-6)
                for move in choices
            ]  # fmt: skip
            state = apply(machine, state, rng.choices(choices, weights)[0], events)
        _check_end(machine, state)
    except ProtocolError as failure:
        failure.trace = [_describe(machine, event) for event in events]
        raise


def _check_end(machine: Machine, state: State) -> None:
    for t, (pc, program) in enumerate(zip(state.pcs, machine.programs, strict=True)):
        if pc < len(program):
            raise ProtocolError("deadlock", f"rank {machine.owner[t][0]} waits for a message that never arrives")


def find_race(machine: Machine) -> str | None:
    """Return the first reuse of a cell that is not ordered after its last use by program order and messages, or None.

    A message is known to be delivered only once it is read, so a slot and the staging of a put are in use until the
    wait for it. Two consecutive words with equal flags are a race too: the second wait may read the first word.
    """
    sends = {
        _message(machine, t, pc): (t, pc)
        for t, pc, instruction in _instructions(machine)
        if isinstance(instruction, Send)
    }
    waits = {
        _message(machine, t, pc): (t, pc)
        for t, pc, instruction in _instructions(machine)
        if isinstance(instruction, Wait)
    }
    order: list[tuple[int, int]] = []  # one run
    # Bit mask over `order`: the instruction itself and all instructions that happen before it.
    past: dict[tuple[int, int], int] = {}

    def predecessors(t: int, pc: int) -> list[tuple[int, int]] | None:
        """Return the instructions that this one directly follows, or None if one of them has not run yet."""
        instruction = machine.programs[t][pc]
        after = [(t, pc - 1)] if pc else []
        if isinstance(instruction, Enter):
            after += [(o, n - 1) for o, n in instruction.after if n]
        elif isinstance(instruction, Wait):
            after.append(sends[_message(machine, t, pc)])
        return after if all(one in past for one in after) else None

    pcs = [0] * len(machine.programs)
    progress = True
    while progress:
        progress = False
        for t, program in enumerate(machine.programs):
            while pcs[t] < len(program) and (after := predecessors(t, pcs[t])) is not None:
                past[t, pcs[t]] = 1 << len(order)
                for one in after:
                    past[t, pcs[t]] |= past[one]
                order.append((t, pcs[t]))
                pcs[t] += 1
                progress = True
    used: dict[int, tuple[int, int]] = {}  # the last send to each cell
    for t, pc in order:
        send = machine.programs[t][pc]
        if not isinstance(send, Send):
            continue
        wait = machine.programs[(waiter := waits[_message(machine, t, pc)])[0]][waiter[1]]
        assert isinstance(wait, Wait)
        if (wait.flag, wait.cells, wait.signal) != (send.flag, send.cells, send.signal):
            return f"flag or slot differs from the send: {_describe(machine, (False, *waiter))}"
        for cell in (*send.cells, *send.staging):
            if cell in used:
                last = machine.programs[used[cell][0]][used[cell][1]]
                assert isinstance(last, Send)
                read = past[waits[_message(machine, *used[cell])]]
                ambiguous = last.flag == send.flag or (last.signal is None) != (send.signal is None)
                if past[t, pc] & read != read or (ambiguous and cell in send.cells):
                    return (
                        f"unordered: {_describe(machine, (False, t, pc))}; {_describe(machine, (False, *used[cell]))}"
                    )
            used[cell] = (t, pc)
    return None if len(order) == sum(map(len, machine.programs)) else "deadlock"


def _instructions(machine: Machine) -> Iterator[tuple[int, int, Instruction]]:
    for t, program in enumerate(machine.programs):
        for pc, instruction in enumerate(program):
            yield t, pc, instruction


def _message(machine: Machine, thread: int, pc: int) -> tuple[int, str, int, int]:
    """Return the key shared by a send and its wait: operation, message name, receiving rank, block."""
    instruction, (rank, _, block) = machine.programs[thread][pc], machine.owner[thread]
    assert isinstance(instruction, Send | Wait)
    return instruction.op, instruction.what, instruction.to if isinstance(instruction, Send) else rank, block
