"""The all-reduce of csrc/nvrar between GPUs; everything else of a group is torch's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from yalis import env
from yalis.comm.base import Communicator
from yalis.comm.custom_allreduce import CustomAllReduceBackend, CustomAllReduceGroup
from yalis.comm.nvrar.build import build, missing
from yalis.comm.nvrar.library import PHASES, Library, Status, int32s, uint64s
from yalis.comm.torch_dist import TorchGroup
from yalis.comm.tuning import Choice
from yalis.errors import YalisError, YalisFailure
from yalis.kernels import ops
from yalis.launch.world import World
from yalis.log import get_logger

log = get_logger(__name__)

# What the kernels call these types.
VALUES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
PROTOCOLS = ("ll", "signal")
ALGORITHMS = {"ring": 1, "oneshot": 2}
# Bytes that one operation moves at most; longer messages are several operations, and very long ones NCCL's, unless
# ranks share a GPU: what NCCL does there cannot be captured.
LL_OP_BYTES, SIGNAL_OP_BYTES, MAX_MESSAGE_BYTES = 1 << 20, 4 << 20, 64 << 20
# Unless a table says otherwise: up to where words win, and what one block handles of a piece.
LL_BYTES, BLOCK_BYTES, MAX_BLOCKS, MAX_CHUNK_BYTES, THREADS = 512 << 10, 8 << 10, 32, 64 << 10, 512
MIN_COMPUTE_CAPABILITY = (7, 0)
# Beside the arena, for what NVSHMEM itself keeps in its heap.
HEAP_SLACK = 64 << 20


@dataclass(frozen=True)
class Launch:
    """How an operation is launched; its chunks must be the same on all ranks, its blocks need not."""

    protocol: str
    blocks: int
    chunk: int
    threads: int = THREADS


def choose_launch(choice: Choice | None, size: int, owners: int, max_blocks: int) -> Launch:
    """The launch for a message of `size` bytes, of which each of `owners` sums a piece."""
    chosen = choice.options if choice is not None else {}
    protocol = chosen.get("protocol", "ll" if size <= LL_BYTES else "signal")
    piece = -(-size // owners)
    blocks = chosen.get("blocks", min(MAX_BLOCKS, -(-piece // BLOCK_BYTES)))
    chunk = chosen.get("chunk", min(max(-(-piece // max(int(blocks), 1)), 1), MAX_CHUNK_BYTES))
    threads = chosen.get("threads", THREADS)
    numbers = (blocks, chunk, threads)
    good = all(isinstance(number, int) and number > 0 for number in numbers)
    if protocol not in PROTOCOLS or not good or int(threads) % 32 or int(threads) > THREADS:
        raise YalisError(
            f"nvrar is asked for protocol={protocol!r}, blocks={blocks!r}, chunk={chunk!r}, threads={threads!r}; "
            f"accepted: {' or '.join(PROTOCOLS)}, numbers above 0, and threads in 32s up to {THREADS}; "
            "run yalis bench allreduce --tune again"
        )
    return Launch(str(protocol), min(int(blocks), max_blocks), int(chunk), int(threads))


def candidate_launches(size: int, owners: int, max_blocks: int) -> list[dict[str, int | str]]:
    """Blocks and chunks worth a trial, for a message of `size` bytes of which each of `owners` sums a piece."""
    piece = -(-size // owners)
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64) if count <= max_blocks]
    # Neither a block that has hardly anything to do, nor few that have far too much.
    fitting = [count for count in counts if 1 << 10 <= piece // count <= 128 << 10]
    tried: list[dict[str, int | str]] = []
    for count in fitting or [counts[0] if piece < 1 << 10 else counts[-1]]:
        tried.append({"blocks": count})  # whose part is one chunk
        tried += [{"blocks": count, "chunk": chunk} for chunk in (4 << 10, 16 << 10) if chunk < piece // count]
    return tried


class Session:
    """NVSHMEM between all ranks of the world, and a thread that notices what went wrong on the device."""

    #: NVSHMEM is one for a process
    running: ClassVar[Session | None] = None

    def __init__(self, world: World, device: torch.device) -> None:
        if Session.running is not None:
            raise YalisFailure("nvrar is already in use in this process; close the engine that uses it first")
        self.world, self.device = world, device
        torch.cuda.set_device(device)
        torch.cuda.current_stream(device).synchronize()  # the context exists before NVSHMEM asks for it
        properties = torch.cuda.get_device_properties(device)
        gpus = world.all_gather_object(str(properties.uuid))
        sharing = gpus.count(gpus[world.rank])
        # A block that waits holds its SM. All that share a GPU leave half of it to those they wait for.
        self.max_blocks = properties.multi_processor_count // 2 // sharing
        if self.max_blocks < 1:
            raise YalisError(
                f"{sharing} ranks share a GPU of {properties.multi_processor_count} SMs, of which nvrar may keep half "
                f"waiting; accepted: up to {properties.multi_processor_count // 2} ranks"
            )
        self.arena = env.nvrar_arena()
        env.prepare_nvshmem(self.arena + HEAP_SLACK, all(member.node == 0 for member in world.members))
        architecture = f"{properties.major}{properties.minor}"
        nodes = [member.node for member in world.members]
        if nodes.index(nodes[world.rank]) == world.rank:  # one builds for its machine, if that is still to be done
            build(architecture)
        world.all_gather_object(None)
        self.library = Library(build(architecture))
        id = world.all_gather_object(self.library.make_id() if world.rank == 0 else None)[0]
        self.library.start(torch.cuda.current_device(), world.rank, world.size, id, self.arena)
        self.status: Status = self.library.status()
        self.names: dict[int, str] = {}
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._look, name="nvrar watch", daemon=True)
        self._watch.start()
        Session.running = self

    def _look(self) -> None:
        """End the job when a wait on the device never ended, and all waits when the job is over."""
        while not self._closing.wait(0.05):
            if self.world.failure is not None:
                self.status.stop = 1
                return
            if self.status.reported:
                self.world.fail(self.describe(), background=True)
                return

    def describe(self) -> str:
        """What timed out on the device, as a sentence."""
        status = self.status
        peer = int(status.peer)
        whom = f" for {self.world.name(peer)}" if peer < self.world.size else ""
        name = self.names.get(int(status.group))
        where = f"of group {name}" if name else "of a baseline"
        return (
            f"waited {env.nvrar_timeout():g} s in the all-reduce {where}"
            f"{whom}: phase {PHASES.get(int(status.phase), '?')}, step {status.step}, operation {status.number}"
        )

    def reserve(self, under: TorchGroup, size: int, what: str) -> list[int]:
        """Where each member of the group keeps `size` bytes in its arena; every member calls this."""
        mine = self.library.reserve(size)
        told = under.all_gather(torch.tensor([mine, size], device=self.device), 0).view(-1, 2).tolist()
        if any(offset < 0 for offset, _ in told):
            raise YalisError(
                f"{what} needs {-(-size >> 20)} MiB of the {self.arena >> 20} MiB that nvrar keeps on every rank, more "
                f"than is left; set YALIS_NVRAR_ARENA to more MiB"
            )
        if any(other != size for _, other in told):
            raise YalisFailure(f"{what}: the ranks disagree about its size")
        return [offset for offset, _ in told]

    def close(self) -> None:
        broken = self.world.failure is not None
        if broken:
            self.status.stop = 1
        torch.cuda.synchronize(self.device)
        self._closing.set()
        self._watch.join()
        Session.running = None
        if not broken:  # else somebody is gone, for whom the end would wait
            self.library.call("end")


class NvrarGroup(CustomAllReduceGroup):
    """One stream at a time issues a group's operations, in the same order on every rank."""

    def __init__(
        self, under: TorchGroup, session: Session, name: str, ranks: Sequence[int], node_of: Sequence[int],
        best: Callable[[int], Choice | None],
    ) -> None:  # fmt: skip
        super().__init__(under)
        self.capturable = True
        self._session, self._library, self._ranks, self._name = session, session.library, tuple(ranks), name
        nodes, world = int32s(node_of), int32s(ranks)
        self._owners = min(list(node_of).count(node) for node in node_of)
        limits = (LL_OP_BYTES, SIGNAL_OP_BYTES)
        size = self._library.call("group_bytes", nodes, self.size, self.rank, *limits)
        if not size:
            raise YalisError(f"group {name} has more than 64 ranks on one node, which nvrar does not take")
        offsets = uint64s(session.reserve(under, size, f"group {name}"))
        self._timeout = int(env.nvrar_timeout() * 1e9)
        self.handle = self._library.call(
            "group", nodes, self.size, self.rank, *limits, world, offsets, self._timeout
        )  # fmt: skip
        session.names[self.handle] = name
        self._flat: dict[str, int] = {}
        self._launch = lru_cache(1024)(lambda size: choose_launch(best(size), size, self._owners, session.max_blocks))
        self.barrier()  # nobody's first message comes before everybody's memory is known

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        target = x if out is None else out
        very_long = x.nbytes > MAX_MESSAGE_BYTES and self.torch_group.capturable
        if x.dtype not in VALUES or target.dtype != x.dtype or not x.numel() or very_long:
            return self.torch_group.all_reduce(x, out)
        source = x.contiguous()
        buffer = target if target.is_contiguous() else torch.empty_like(source)
        self.launch(source, buffer, self._launch(x.nbytes))
        return target if buffer is target else target.copy_(buffer)

    @property
    def gather_capturable(self) -> bool:
        return True

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """NCCL's, but not where ranks share a GPU: there a graph cannot capture it, and this is a sum.

        Each rank brings its own part, and zeros for the others'. (A negative zero comes back as a positive one. Other
        types than nvrar's, and more than MAX_MESSAGE_BYTES bytes, are NCCL's there too; no graph holds such a gather.)
        """
        if (
            self.torch_group.capturable
            or x.dtype not in VALUES
            or not x.numel()
            or x.nbytes * self.size > MAX_MESSAGE_BYTES
        ):
            return self.torch_group.all_gather(x, dim)
        parts = x.new_zeros((self.size, *x.shape))
        parts[self.rank] = x
        return torch.cat(self.all_reduce(parts).unbind(), dim)

    def launch(self, x: Tensor, out: Tensor, how: Launch) -> None:
        """The sum of `x`, contiguous and of a known type, in `out`."""
        self._library.call(
            "all_reduce", self.handle, x.data_ptr(), out.data_ptr(), x.numel(), VALUES[x.dtype],
            PROTOCOLS.index(how.protocol), how.blocks, how.threads, how.chunk, _stream(x),
        )  # fmt: skip

    def all_reduce_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += the sum of `x`, which it leaves in `x`; returns the RMSNorm of that residual. In one kernel.

        `x` and `residual` are [rows, width]; the weight has their dtype, or float32.
        """
        how = self._launch(x.nbytes)
        fits = x.nbytes <= (LL_OP_BYTES if how.protocol == "ll" else SIGNAL_OP_BYTES) and x.numel() > 0
        plain = all(tensor.is_contiguous() for tensor in (x, residual, weight)) and residual.dtype == x.dtype
        if not (fits and plain and x.dtype in VALUES and weight.dtype in (x.dtype, torch.float32)):
            residual += self.all_reduce(x)
            return ops.rms_norm(residual, weight, eps)
        normed = torch.empty_like(x)
        self._library.call(
            "all_reduce_norm", self.handle, x.data_ptr(), x.data_ptr(), x.shape[0], x.shape[1], VALUES[x.dtype],
            PROTOCOLS.index(how.protocol), how.blocks, how.threads, how.chunk, residual.data_ptr(), normed.data_ptr(),
            weight.data_ptr(), int(weight.dtype == torch.float32), eps, _stream(x),
        )  # fmt: skip
        return normed

    def candidate_options(self, size: int, algorithm: str = "nvrar") -> list[dict[str, int | str]]:
        """What `yalis bench allreduce --tune` measures for messages of `size` bytes; baselines have words only."""
        launches = candidate_launches(size, self._owners_of(algorithm), self._session.max_blocks)
        if algorithm != "nvrar":
            return launches
        protocols = ["ll"] if size < 64 << 10 else ["ll", "signal"] if size <= 4 << 20 else ["signal"]
        return [{"protocol": protocol, **launch} for protocol in protocols for launch in launches]

    def _owners_of(self, algorithm: str) -> int:
        """In how many pieces a message is summed."""
        return {"nvrar": self._owners, "ring": self.size}.get(algorithm, 1)

    def all_reduce_with(self, x: Tensor, out: Tensor, algorithm: str = "nvrar", **options: int | str) -> Tensor:
        """For benchmarks: nvrar with these options, or a baseline on the same words (ring, oneshot), or NVSHMEM's own.

        All take contiguous tensors; NVSHMEM's own takes those of `symmetric`, and a group of the whole world.
        """
        if algorithm == "nvshmem":
            self._library.call(
                "library_all_reduce", x.data_ptr(), out.data_ptr(), x.numel(), VALUES[x.dtype], _stream(x)
            )
            return out
        if algorithm not in ("nvrar", *ALGORITHMS):
            raise YalisError(f"unknown algorithm {algorithm!r}; accepted: nvrar, ring, oneshot, nvshmem")
        how = choose_launch(Choice("nvrar", options), x.nbytes, self._owners_of(algorithm), self._session.max_blocks)
        if algorithm == "nvrar":
            self.launch(x, out, how)
            return out
        number = ALGORITHMS[algorithm]
        if algorithm not in self._flat:  # every rank comes here at the same time
            size = self._library.call("flat_bytes", number, self.size, LL_OP_BYTES)
            offsets = uint64s(self._session.reserve(self.torch_group, size, f"the {algorithm} of group {self._name}"))
            self._flat[algorithm] = self._library.call(
                "flat_group", number, self.size, self.rank, LL_OP_BYTES, int32s(self._ranks), offsets, self._timeout
            )
            self.barrier()
        self._library.call(
            "flat_all_reduce", self._flat[algorithm], number, x.data_ptr(), out.data_ptr(), x.numel(),
            VALUES[x.dtype], how.blocks, how.threads, how.chunk, _stream(x),
        )  # fmt: skip
        return out

    def symmetric(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor at the same place of every arena, which NVSHMEM's own collectives need. Every rank calls this."""
        size = torch.Size(shape).numel() * dtype.itemsize
        offsets = self._session.reserve(self.torch_group, size, "a symmetric tensor")
        if len(set(offsets)) != 1:
            raise YalisFailure("the ranks' arenas are not filled alike, so a tensor has no common place in them")
        held = _Memory(self._library.call("arena") + offsets[0], size)
        return torch.as_tensor(held, device=self._session.device).view(dtype).view(shape)


class NvrarBackend(CustomAllReduceBackend):
    name = "nvrar"

    def _start(self) -> None:
        self._session = Session(self.world, self.device) if self.world.size > 1 else None

    @classmethod
    def unusable(cls, world: World, device: torch.device) -> str | None:
        if device.type != "cuda" or torch.version.cuda is None:
            lacking = missing()
            return "it joins NVIDIA GPUs, and torch sees none here" + (f"; besides, {lacking}" if lacking else "")
        if torch.cuda.get_device_capability(device) < MIN_COMPUTE_CAPABILITY:
            return "nvrar needs a GPU of compute capability 7.0 or newer"
        return missing() or super().unusable(world, device)

    def check(self) -> None:
        if self._session is not None and self._session.status.reported:
            raise YalisFailure(f"{self.world.name(self.world.rank)}: {self._session.describe()}")

    def wrap_group(self, under: TorchGroup, name: str, ranks: Sequence[int]) -> Communicator:
        assert self._session is not None  # a world of one has no such groups
        nodes = self.topology.by_node(ranks)
        tuned = self.table.for_nodes(nodes)
        node_of = [self.topology.node_of[rank] for rank in ranks]
        return NvrarGroup(under, self._session, name, ranks, node_of, lambda size: tuned.best(size, "nvrar"))

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
        super().close()


class _Memory:
    """A range of device memory, as torch takes one in."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def _stream(x: Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream
