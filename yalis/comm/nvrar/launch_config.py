"""Launch parameters of an all-reduce: from the tuning table, else a default that suits the transport."""

from __future__ import annotations

from dataclasses import dataclass

from yalis.comm.nvrar.transport import Transport
from yalis.comm.tuning import Choice
from yalis.errors import YalisError

# In the order of the C interface: low-latency (data and flag in one 8-byte store), put-with-signal, and lines of 128
# bytes with one flag, which are used only where a test has shown that they arrive whole.
PROTOCOLS = ("ll", "signal", "line")
# In the order of enum Schedule. "two-shot" is what the kernel of "doubling" does within one node.
SCHEDULES = {"doubling": 0, "two-shot": 0, "halving": 1, "one-shot": 2}
# The most bytes of one operation (lines: as LL). Longer messages are split into several operations.
LL_OP_BYTES, SIGNAL_OP_BYTES = 1 << 20, 4 << 20
MAX_CHUNK_BYTES, THREADS = 64 << 10, 512


@dataclass(frozen=True)
class LaunchDefaults:
    """What to use without a tuning table, and what `yalis bench allreduce --tune` tries."""

    ll_max_bytes: int | None  # the LL protocol up to this size, put-with-signal above; None: LL for all sizes
    bytes_per_block: int  # one block for each so many bytes of a shard
    max_blocks: int
    tuned_chunks: tuple[int, ...]  # bytes of a chunk, besides one chunk per block


#: Stores of the GPU, and requests that it writes for the NIC itself: small chunks overlap with the additions, and a
#: signal costs little.
DIRECT = LaunchDefaults(512 << 10, 8 << 10, 32, (4 << 10, 16 << 10))
#: A CPU thread sends the puts, about 1 us each, and a signal waits in it for all puts before. So few large puts, and no
#: signals.
PROXIED = LaunchDefaults(None, 64 << 10, 8, (32 << 10, 128 << 10, 256 << 10))


def defaults_for(transport: Transport) -> LaunchDefaults:
    return PROXIED if transport.proxied else DIRECT


@dataclass(frozen=True)
class LaunchConfig:
    """Launch parameters of one operation. Protocol and chunk must be the same on all ranks; blocks may differ."""

    protocol: str
    blocks: int
    chunk: int  # bytes
    threads: int = THREADS
    schedule: str = "doubling"  # see SCHEDULES; the same on all ranks


def schedules_for(nodes: int) -> tuple[str, ...]:
    """Return the schedules of a group on so many nodes, the default first."""
    return ("two-shot", "one-shot") if nodes == 1 else ("doubling", "halving")


def choose_launch(
    choice: Choice | None, size: int, num_shards: int, max_blocks: int, defaults: LaunchDefaults = DIRECT,
    nodes: int = 2,
) -> LaunchConfig:  # fmt: skip
    """Return the launch parameters for a message of `size` bytes that is reduced in `num_shards` shards."""
    options = choice.options if choice is not None else {}
    schedule = options.get("schedule", schedules_for(nodes)[0])
    if schedule not in schedules_for(nodes):
        raise YalisError(
            f"the tuning table has nvrar with schedule={schedule!r} for {nodes} node{'s' * (nodes > 1)}; accepted: "
            f"{' or '.join(schedules_for(nodes))}; run yalis bench allreduce --tune again"
        )
    if schedule == "one-shot":
        num_shards = 1
    is_short = defaults.ll_max_bytes is None or size <= defaults.ll_max_bytes
    protocol = options.get("protocol", "ll" if is_short else "signal")
    shard = -(-size // num_shards)
    blocks = options.get("blocks", min(defaults.max_blocks, -(-shard // defaults.bytes_per_block)))
    # With halving, each of the nodes finishes its own chunks.
    parts = max(int(blocks), 1 << nodes.bit_length() - 1 if schedule == "halving" else 1)
    chunk = options.get("chunk", min(max(-(-shard // parts), 1), MAX_CHUNK_BYTES))
    threads = options.get("threads", THREADS)
    valid = all(isinstance(number, int) and number > 0 for number in (blocks, chunk, threads))
    if protocol not in PROTOCOLS or not valid or int(threads) % 32 or int(threads) > THREADS:
        raise YalisError(
            f"the tuning table has nvrar with protocol={protocol!r}, blocks={blocks!r}, chunk={chunk!r}, "
            f"threads={threads!r}; accepted: protocol {' or '.join(PROTOCOLS)}, numbers above 0, and threads in "
            f"multiples of 32 up to {THREADS}; run yalis bench allreduce --tune again"
        )
    return LaunchConfig(str(protocol), min(int(blocks), max_blocks), int(chunk), int(threads), str(schedule))


def candidate_launches(
    size: int, num_shards: int, max_blocks: int, defaults: LaunchDefaults = DIRECT
) -> list[dict[str, int | str]]:
    """Return block counts and chunk sizes worth measuring, for a message of `size` bytes in `num_shards` shards."""
    shard = -(-size // num_shards)
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64) if count <= max_blocks]
    # Skip counts that leave a block with very little or far too much data.
    fitting = [count for count in counts if 1 << 10 <= shard // count <= 128 << 10]
    candidates: list[dict[str, int | str]] = []
    for count in fitting or [counts[0] if shard < 1 << 10 else counts[-1]]:
        candidates.append({"blocks": count})  # one chunk per block
        candidates += [{"blocks": count, "chunk": chunk} for chunk in defaults.tuned_chunks if chunk < shard // count]
    return candidates


def candidate_schedules(size: int, num_shards: int, nodes: int) -> tuple[str, ...]:
    """Return the schedules worth measuring: another needs few bytes within a node, many bytes between nodes."""
    default, other = schedules_for(nodes)
    useful = size * num_shards <= LL_OP_BYTES if nodes == 1 else nodes > 2 and size >= 256 << 10
    return (default, other) if useful else (default,)


def candidate_protocols(size: int, defaults: LaunchDefaults, whole_lines: bool = False) -> tuple[str, ...]:
    """Return the protocols worth measuring for a message of `size` bytes. `whole_lines`: lines arrive whole."""
    if size < 64 << 10:
        return ("ll",)
    lines = ("line",) if whole_lines else ()
    return ("ll", "signal", *lines) if size <= 4 << 20 or defaults.ll_max_bytes is None else ("signal", *lines)
