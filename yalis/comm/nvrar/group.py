"""The `nvrar` backend: the all-reduce kernels of csrc/nvrar between GPUs; torch provides the other collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from yalis import env
from yalis.comm.base import Communicator, counted
from yalis.comm.custom_allreduce import CustomAllReduceBackend, CustomAllReduceGroup
from yalis.comm.nvrar.build import build, missing
from yalis.comm.nvrar.launch_config import (
    LL_OP_BYTES,
    PROTOCOLS,
    SCHEDULES,
    SIGNAL_OP_BYTES,
    LaunchConfig,
    candidate_launches,
    candidate_protocols,
    candidate_schedules,
    choose_launch,
    defaults_for,
)
from yalis.comm.nvrar.library import PHASES, Library, Status, int32s, uint64s
from yalis.comm.nvrar.transport import (
    NONE,
    agree_on_transport,
    explain_start_failure,
    local_transport,
    transport_variables,
)
from yalis.comm.torch_dist import TorchGroup
from yalis.comm.tuning import Choice
from yalis.errors import YalisError, YalisFailure
from yalis.kernels.pdl import pdl_enabled
from yalis.launch.world import World
from yalis.log import get_logger

log = get_logger(__name__)

# The dtype codes of the C interface.
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
BASELINES = {"ring": 1, "oneshot": 2}
# Longer messages are left to NCCL, unless ranks share a GPU, where NCCL cannot be captured in a CUDA graph.
MAX_MESSAGE_BYTES = 64 << 20
MIN_COMPUTE_CAPABILITY = (7, 0)
# Added to the arena for NVSHMEM's own use of the symmetric heap.
HEAP_SLACK = 64 << 20
# The norm is fused into an all-reduce of at most so many rows per block, because a block norms whole rows.
NORM_ROWS_PER_BLOCK = 2
TEAR_TEST_ROUNDS = 2000


class Session:
    """NVSHMEM between all ranks of the world, and a watchdog thread for device-side timeouts."""

    #: NVSHMEM can be initialized once at a time per process
    running: ClassVar[Session | None] = None

    def __init__(self, world: World, device: torch.device) -> None:
        if Session.running is not None:
            raise YalisFailure("nvrar is already in use in this process; close the engine that uses it first")
        self.world, self.device = world, device
        torch.cuda.set_device(device)
        torch.cuda.current_stream(device).synchronize()  # NVSHMEM needs an existing CUDA context
        properties = torch.cuda.get_device_properties(device)
        gpus = world.all_gather_object(str(properties.uuid))
        ranks_on_gpu = gpus.count(gpus[world.rank])
        # A block that polls occupies its SM. The ranks of one GPU together leave half of its SMs free, so that the
        # kernels they wait for can run.
        self.max_blocks = properties.multi_processor_count // 2 // ranks_on_gpu
        if self.max_blocks < 1:
            raise YalisError(
                f"{ranks_on_gpu} ranks share a GPU of {properties.multi_processor_count} SMs, and nvrar may use half "
                f"of the SMs; accepted: up to {properties.multi_processor_count // 2} ranks per GPU"
            )
        self.transport = agree_on_transport(world, str(properties.uuid))
        if self.transport.name == NONE:
            raise YalisError(f"nvrar has no transport between the hosts of this job: {self.transport.reason}")
        if world.rank == 0:
            log.info("nvrar uses the transport %s", self.transport)
        self.defaults = defaults_for(self.transport)
        self.arena = env.nvrar_arena()
        variables = transport_variables(self.transport, world.members[world.rank].address)
        env.prepare_nvshmem(self.arena + HEAP_SLACK, variables)
        architecture = f"{properties.major}{properties.minor}"
        nodes = [member.node for member in world.members]
        if nodes.index(nodes[world.rank]) == world.rank:  # the first rank of each machine builds the library
            build(architecture)
        world.all_gather_object(None)
        self.library = Library(build(architecture))
        unique_id = world.all_gather_object(self.library.get_unique_id() if world.rank == 0 else None)[0]
        try:
            self.library.init(torch.cuda.current_device(), world.rank, world.size, unique_id, self.arena)
        except YalisFailure as error:
            raise YalisFailure(explain_start_failure(str(error), self.transport)) from error
        self.status: Status = self.library.status()
        self.group_names: dict[int, str] = {}
        self._closing = threading.Event()
        self._watchdog = threading.Thread(target=self._poll_status, name="nvrar watchdog", daemon=True)
        self._watchdog.start()
        Session.running = self

    def _poll_status(self) -> None:
        """Fail the job if a wait on the device timed out, and end all device waits if the job has failed."""
        while not self._closing.wait(0.05):
            if self.world.failure is not None:
                self.status.stop = 1
                return
            if self.status.reported:
                self.world.fail(self.describe_timeout(), background=True)
                return

    def describe_timeout(self) -> str:
        """Return a sentence about the wait that timed out on the device."""
        status = self.status
        peer = int(status.peer)
        peer_name = f" for {self.world.name(peer)}" if peer < self.world.size else ""
        name = self.group_names.get(int(status.group))
        where = f"of group {name}" if name else "of a baseline"
        return (
            f"waited {env.nvrar_timeout():g} s in the all-reduce {where}{peer_name}: "
            f"phase {PHASES.get(int(status.phase), '?')}, step {status.step}, operation {status.sequence}"
        )

    def reserve(self, torch_group: TorchGroup, size: int, what: str) -> list[int]:
        """Reserve `size` bytes in the arena of each rank of the group. Returns every rank's offset.

        Every rank of the group calls this. `what` names the memory in error messages.
        """
        offset = self.library.reserve(size)
        reserved = torch_group.all_gather(torch.tensor([offset, size], device=self.device), 0).view(-1, 2).tolist()
        if any(offset < 0 for offset, _ in reserved):
            raise YalisError(
                f"{what} needs {-(-size >> 20)} MiB of nvrar's arena of {self.arena >> 20} MiB per rank, more than is "
                f"left; set YALIS_NVRAR_ARENA to more MiB"
            )
        if any(other != size for _, other in reserved):
            raise YalisFailure(f"{what}: the ranks reserved different sizes")
        return [offset for offset, _ in reserved]

    def close(self) -> None:
        broken = self.world.failure is not None
        if broken:
            self.status.stop = 1
        torch.cuda.synchronize(self.device)
        self._closing.set()
        self._watchdog.join()
        Session.running = None
        if not broken:  # finalize is collective, so it would wait for a dead rank
            self.library.call("finalize")


class NvrarGroup(CustomAllReduceGroup):
    """All-reduce over one group. Operations are issued on one stream at a time, in the same order on every rank."""

    def __init__(
        self, torch_group: TorchGroup, session: Session, name: str, ranks: Sequence[int], node_of: Sequence[int],
        best: Callable[[int], Choice | None], lines: bool = False,
    ) -> None:  # fmt: skip
        """`node_of`: the node of each of `ranks`. `best` returns the tuned choice for a message of that many bytes;
        `lines`: some choice has the protocol "line"."""
        super().__init__(torch_group)
        self.capturable = True
        self.pdl_safe = True
        self._session, self._library, self._ranks, self._name = session, session.library, tuple(ranks), name
        nodes, world_ranks = int32s(node_of), int32s(ranks)
        self._num_shards = min(list(node_of).count(node) for node in node_of)
        self._nodes = len(set(node_of))
        self._fuse_norm = env.nvrar_fuse_norm()
        # The next kernel must not wait on SMs that other ranks need to finish this all-reduce.
        self._pdl_code = 1 if session.transport.ranks_per_gpu > 1 else 2
        limits = (LL_OP_BYTES, SIGNAL_OP_BYTES)
        size = self._library.call("group_bytes", nodes, self.size, self.rank, *limits)
        if not size:
            raise YalisError(f"group {name} has more than 64 ranks on one node, which nvrar does not support")
        offsets = uint64s(session.reserve(torch_group, size, f"group {name}"))
        self._timeout = int(env.nvrar_timeout() * 1e9)
        self.handle = self._library.call(
            "create_group", nodes, self.size, self.rank, *limits, world_ranks, offsets, self._timeout
        )  # fmt: skip
        session.group_names[self.handle] = name
        self._flat_handles: dict[str, int] = {}
        self._launch = lru_cache(1024)(
            lambda size: choose_launch(
                best(size), size, self._num_shards, session.max_blocks, session.defaults, self._nodes
            )
        )
        self._whole_lines: bool | None = None  # not tested yet
        self.barrier()  # every rank's memory is set up before the first message arrives
        if lines and not self.lines_arrive_whole():
            raise YalisError(
                f"the tuning table has nvrar with protocol=line for group {name}, but lines of 128 bytes arrive torn "
                f"over the transport {session.transport.name}; run yalis bench allreduce --tune again"
            )

    @counted
    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        target = x if out is None else out
        leave_to_nccl = x.nbytes > MAX_MESSAGE_BYTES and self.torch_group.capturable
        if x.dtype not in DTYPES or target.dtype != x.dtype or not x.numel() or leave_to_nccl:
            return self.torch_group.all_reduce(x, out)
        source = x.contiguous()
        buffer = target if target.is_contiguous() else torch.empty_like(source)
        self.launch(source, buffer, self._launch(x.nbytes))
        return target if buffer is target else target.copy_(buffer)

    @property
    def gather_capturable(self) -> bool:
        return True

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Use NCCL, except if ranks share a GPU: a CUDA graph cannot capture it there, so use an all-reduce instead.

        Each rank contributes its part and zeros for the other ranks' parts, so a negative zero becomes a positive one.
        Unsupported dtypes and more than MAX_MESSAGE_BYTES still go to NCCL; a graph cannot capture those.
        """
        supported = x.dtype in DTYPES and x.numel() > 0 and x.nbytes * self.size <= MAX_MESSAGE_BYTES
        if self.torch_group.capturable or not supported:
            return self.torch_group.all_gather(x, dim)
        parts = x.new_zeros((self.size, *x.shape))
        parts[self.rank] = x
        return torch.cat(self.all_reduce(parts).unbind(), dim)

    def launch(self, x: Tensor, out: Tensor, config: LaunchConfig) -> None:
        """Launch the all-reduce of `x` into `out`. Both must be contiguous and of a supported dtype."""
        self._library.call(
            "all_reduce", self.handle, x.data_ptr(), out.data_ptr(), x.numel(), DTYPES[x.dtype],
            PROTOCOLS.index(config.protocol), SCHEDULES[config.schedule], config.blocks, config.threads, config.chunk,
            self._pdl(), _stream(x),
        )  # fmt: skip

    def _pdl(self) -> int:
        """Return how the C interface launches kernels now, see launch.cu."""
        return self._pdl_code if pdl_enabled() else 0

    def all_reduce_add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """All-reduce, residual and norm in one kernel where that is faster, else in two or more.

        With YALIS_NVRAR_FUSE_NORM=0 the norm is a kernel of its own, with the same bits.
        """
        config = self._norm_launch(x, residual, weight) if env.experimental() else None
        if config is None:
            return super().all_reduce_add_norm(x, residual, weight, eps)
        return self._all_reduce_add_norm(x, residual, weight, eps, config)

    def _norm_launch(self, x: Tensor, residual: Tensor, weight: Tensor) -> LaunchConfig | None:
        """Return the launch parameters for an all-reduce with its norm, or None if another norm has to follow."""
        supported = x.dtype in DTYPES and residual.dtype == x.dtype and weight.dtype in (x.dtype, torch.float32)
        if not supported or not all(tensor.is_contiguous() for tensor in (x, residual, weight)) or not x.numel():
            return None
        config = self._launch(x.nbytes)
        limit = SIGNAL_OP_BYTES if config.protocol == "signal" else LL_OP_BYTES
        if config.schedule == "one-shot":
            limit //= self._num_shards
        # Blocks beyond those of the plain all-reduce only wait, and then norm rows.
        config = replace(config, blocks=max(config.blocks, min(x.shape[0], self._session.max_blocks)))
        return config if x.nbytes <= limit and x.shape[0] <= NORM_ROWS_PER_BLOCK * config.blocks else None

    @counted
    def _all_reduce_add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, config: LaunchConfig
    ) -> tuple[Tensor, Tensor]:
        normed, summed = torch.empty_like(x), torch.empty_like(x)
        rows, width, dtype = *x.shape, DTYPES[x.dtype]
        norm = (
            residual.data_ptr(), summed.data_ptr(), normed.data_ptr(), weight.data_ptr(),
            int(weight.dtype == torch.float32), eps,
        )  # fmt: skip
        if self._fuse_norm:
            self._library.call(
                "all_reduce_norm", self.handle, x.data_ptr(), x.data_ptr(), rows, width, dtype,
                PROTOCOLS.index(config.protocol), SCHEDULES[config.schedule], config.blocks, config.threads,
                config.chunk, *norm, self._pdl(), _stream(x),
            )  # fmt: skip
        else:
            self.launch(x, x, config)
            self._library.call(
                "add_norm", x.data_ptr(), rows, width, dtype, rows, config.threads, *norm, _stream(x)
            )  # fmt: skip
        return normed, summed

    def lines_arrive_whole(self) -> bool:
        """Whether the tear test found no torn line on any rank. The first call is collective and synchronizes."""
        if self._nodes == 1:
            return False  # lines are only used between nodes
        if self._whole_lines is None:
            stream = torch.cuda.current_stream(self._session.device)
            torn = self._library.call("tear_test", self.handle, 0, TEAR_TEST_ROUNDS, stream.cuda_stream)
            found = torch.tensor([torn], device=self._session.device)
            total = int(self.torch_group.all_gather(found, 0).sum())  # also the barrier that must follow
            log.info("tear test of group %s: %d lines of 128 bytes were torn", self._name, total)
            self._whole_lines = total == 0
        return self._whole_lines

    def candidate_options(self, size: int, algorithm: str = "nvrar") -> list[dict[str, int | str]]:
        """Return the options that `yalis bench allreduce --tune` measures. The baselines use the LL protocol only."""
        session, num_shards = self._session, self._num_shards_of(algorithm)
        if algorithm != "nvrar":
            return candidate_launches(size, num_shards, session.max_blocks, session.defaults)
        options: list[dict[str, int | str]] = []
        for schedule in candidate_schedules(size, num_shards, self._nodes):
            shards = 1 if schedule == "one-shot" else num_shards
            launches = candidate_launches(size, shards, session.max_blocks, session.defaults)
            for protocol in candidate_protocols(size, session.defaults, self.lines_arrive_whole()):
                options += [{"protocol": protocol, "schedule": schedule, **launch} for launch in launches]
        return options

    def _num_shards_of(self, algorithm: str) -> int:
        """Return the number of shards that a message is reduced in."""
        return {"nvrar": self._num_shards, "ring": self.size}.get(algorithm, 1)

    def all_reduce_with(self, x: Tensor, out: Tensor, algorithm: str = "nvrar", **options: int | str) -> Tensor:
        """Run nvrar with these options, a baseline (ring, oneshot), or NVSHMEM's all-reduce, for benchmarks.

        Tensors must be contiguous. NVSHMEM's needs tensors of `symmetric_tensor` and a group of all world ranks.
        """
        if algorithm == "nvshmem":
            self._library.call(
                "nvshmem_all_reduce", x.data_ptr(), out.data_ptr(), x.numel(), DTYPES[x.dtype], _stream(x)
            )
            return out
        if algorithm not in ("nvrar", *BASELINES):
            raise YalisError(f"unknown algorithm {algorithm!r}; accepted: nvrar, ring, oneshot, nvshmem")
        session, num_shards = self._session, self._num_shards_of(algorithm)
        config = choose_launch(
            Choice("nvrar", options), x.nbytes, num_shards, session.max_blocks, session.defaults,
            self._nodes if algorithm == "nvrar" else 2,
        )  # fmt: skip
        if algorithm == "nvrar":
            self.launch(x, out, config)
            return out
        code = BASELINES[algorithm]
        if algorithm not in self._flat_handles:  # collective: every rank gets here at the same time
            size = self._library.call("flat_bytes", code, self.size, LL_OP_BYTES)
            offsets = uint64s(self._session.reserve(self.torch_group, size, f"the {algorithm} of group {self._name}"))
            self._flat_handles[algorithm] = self._library.call(
                "create_flat_group", code, self.size, self.rank, LL_OP_BYTES, int32s(self._ranks), offsets,
                self._timeout,
            )  # fmt: skip
            self.barrier()
        self._library.call(
            "flat_all_reduce", self._flat_handles[algorithm], code, x.data_ptr(), out.data_ptr(), x.numel(),
            DTYPES[x.dtype], config.blocks, config.threads, config.chunk, _stream(x),
        )  # fmt: skip
        return out

    def symmetric_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor at the same offset of every arena, as NVSHMEM's collectives need. Every rank calls this."""
        size = torch.Size(shape).numel() * dtype.itemsize
        offsets = self._session.reserve(self.torch_group, size, "a symmetric tensor")
        if len(set(offsets)) != 1:
            raise YalisFailure("a symmetric tensor has no common offset, because the ranks' arenas differ in use")
        memory = _DeviceMemory(self._library.call("arena") + offsets[0], size)
        return torch.as_tensor(memory, device=self._session.device).view(dtype).view(shape)


class NvrarBackend(CustomAllReduceBackend):
    name = "nvrar"

    def _initialize(self) -> None:
        self._session = Session(self.world, self.device) if self.world.size > 1 else None

    @classmethod
    def unusable(cls, world: World, device: torch.device) -> str | None:
        if device.type != "cuda" or torch.version.cuda is None:
            also = missing()
            return "nvrar needs NVIDIA GPUs, and torch finds none" + (f"; also, {also}" if also else "")
        if torch.cuda.get_device_capability(device) < MIN_COMPUTE_CAPABILITY:
            return "nvrar needs a GPU of compute capability 7.0 or newer"
        if (absent := missing()) is not None:
            return absent
        transport = local_transport(world)
        return transport.reason if transport.name == NONE else super().unusable(world, device)

    def check(self) -> None:
        if self._session is not None and self._session.status.reported:
            raise YalisFailure(f"{self.world.name(self.world.rank)}: {self._session.describe_timeout()}")

    def wrap_group(self, torch_group: TorchGroup, name: str, ranks: Sequence[int]) -> Communicator:
        assert self._session is not None  # groups of several ranks need a world of several ranks
        timings = self.table.for_nodes(self.topology.by_node(ranks))
        node_of = [self.topology.node_of[rank] for rank in ranks]
        lines = any(timing.choice.options.get("protocol") == "line" for timing in timings.timings)
        return NvrarGroup(
            torch_group, self._session, name, ranks, node_of, lambda size: timings.best(size, "nvrar"), lines
        )

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
        super().close()


class _DeviceMemory:
    """A range of device memory, exposed to torch through the CUDA array interface."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def _stream(x: Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream
