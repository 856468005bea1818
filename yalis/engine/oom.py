"""Memory that did not suffice, as a sentence: what was needed, what was free, what would fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import floor

import torch

from yalis.config import EngineConfig
from yalis.engine.device import CPU_KV_MEMORY
from yalis.errors import YalisFailure
from yalis.parallel.memory import spell_bytes

# How allocators that have no more say so, beside exceptions of their own, and how they tell what they were asked for.
_FULL = ("can't allocate memory", "CUDA error: out of memory")
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMG]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def is_out_of_memory(error: BaseException) -> bool:
    """A GPU's allocator has its own exception; its driver and the CPU's allocator raise a plain RuntimeError."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(word in str(error) for word in _FULL)


@dataclass(frozen=True)
class OutOfMemory:
    """In bytes; None where nobody says."""

    asked: int | None  # in the end
    free: int | None  # on the device, then
    taken: int = 0  # until then by the same work, as far as the device's allocator tells

    @property
    def needed(self) -> int | None:
        """By the work, at least: it did not come to its end."""
        return None if self.asked is None else self.taken + self.asked

    @property
    def room(self) -> int | None:
        """For the work, when it began."""
        return None if self.free is None else self.taken + self.free

    @property
    def short(self) -> int | None:
        """What was missing; None also where there was enough, in pieces that were too small."""
        if self.asked is None or self.free is None or self.asked <= self.free:
            return None
        return self.asked - self.free

    def fitting(self, count: int) -> int | None:
        """How many of `count` alike, of which the work consists, have room."""
        if not (self.short and self.needed and self.room):
            return None
        return count * self.room // self.needed

    def __str__(self) -> str:
        needed = "" if self.needed is None else f"at least {spell_bytes(self.needed)} needed, "
        return f"{needed}{_spell(self.room)} free"


@contextmanager
def explain_oom(
    device: torch.device, say: Callable[[OutOfMemory], str], before: int | None = None, needed: int = 0
) -> Iterator[None]:
    """Memory that runs out inside becomes a sentence. `before`: bytes that were allocated, where the caller knows.

    `needed`: what is known to be, of a host's memory: that is promised to anybody, and who takes it is ended later.
    """
    if device.type == "cpu" and needed > (free := free_bytes(device) or needed):
        raise YalisFailure(say(OutOfMemory(needed, free)))
    if before is None:
        before = allocated_bytes(device)
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # A capture that was broken off complains about that.
        full = next((one for one in (error, error.__context__) if one is not None and is_out_of_memory(one)), None)
        if full is None:
            raise
        told = _ASKED.search(str(full))
        asked = round(float(told[1]) * _UNITS[told[2]]) if told else None
        lack = OutOfMemory(asked, free_bytes(device), max(0, allocated_bytes(device) - before))
        raise YalisFailure(say(lack)) from error


def allocated_bytes(device: torch.device) -> int:
    """By this process, where the device's allocator counts them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def free_bytes(device: torch.device) -> int | None:
    """What a device has left for anybody; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = re.search(r"MemAvailable:\s+(\d+) kB", file.read())
    except OSError:
        return None
    return int(found[1]) << 10 if found else None


def weights_do_not_fit(
    lack: OutOfMemory, label: str, weight_bytes: int, ranks: int, dtype: torch.dtype, device: torch.device
) -> str:
    """`weight_bytes`: of this rank, one of `ranks` that share the model."""
    ways = ["a smaller model"]
    if dtype == torch.float32:
        ways.insert(0, "--dtype bfloat16, which takes half")
    if lack.room is not None and weight_bytes <= lack.room:  # it was something beside them
        ways = ["a smaller --max-num-seqs or --max-model-len"]
    elif lack.room and device.type == "cuda":
        enough = -(-ranks * weight_bytes // lack.room)
        ways.insert(0, f"{enough} GPUs at least, with --tp {enough}")
    return (
        f"{label} in {str(dtype).removeprefix('torch.')} does not fit the memory of {device}: its weights there take "
        f"{spell_bytes(weight_bytes)}, {_spell(lack.room)} free; give {', or '.join(ways)}"
    )


def cache_does_not_fit(
    lack: OutOfMemory, config: EngineConfig, blocks: int, block_bytes: int, device: torch.device
) -> str:
    needed = blocks * block_bytes
    room = lack.room if lack.room is not None and lack.room < needed else None
    if config.kv_memory is not None:
        asked, way = f" (--kv-memory {config.kv_memory:g})", _at_most("--kv-memory", room and room / 2**30)
    else:
        asked, way = "", _at_most("--kv-blocks", room and room // block_bytes)
    return (
        f"a KV cache of {blocks} blocks{asked} does not fit the memory of {device}: {spell_bytes(needed)} needed, "
        f"{_spell(lack.room)} free; give {way}"
    )


def step_does_not_fit(
    lack: OutOfMemory, config: EngineConfig, device: torch.device, tokens: int, sequences: int, block_bytes: int
) -> str:
    """Explain that a step of these tokens did not fit; with one token per sequence, the sequences are what counts."""
    counts, work = (tokens, 0), f"{tokens} tokens"
    if tokens == sequences:
        counts, work = (0, sequences), f"{sequences} sequences"
    fits = suggest_fit(lack, config, device, *counts, block_bytes)
    return f"{device} ran out of memory in a step of {work}: {lack}; give {', or '.join(fits)}"


def suggest_fit(
    lack: OutOfMemory,
    config: EngineConfig,
    device: torch.device,
    tokens: int = 0,
    sequences: int = 0,
    block_bytes: int = 0,
) -> list[str]:
    """What to give for a step of so many tokens or sequences, with numbers where a proportion tells them.

    `block_bytes`: of the KV cache, which could do with less; 0 before it has any memory.
    """
    short, found = lack.short, []
    if tokens:
        found.append(_at_most("--max-batch-tokens", lack.fitting(tokens)))
    if sequences:
        found.append(_at_most("--max-num-seqs", lack.fitting(sequences)))
    if not block_bytes:
        return found
    if config.kv_blocks is not None:
        found.append(_at_most("--kv-blocks", short and config.kv_blocks - -(-short // block_bytes)))
    elif config.kv_memory is not None or device.type == "cpu":
        found.append(_at_most("--kv-memory", short and (config.kv_memory or CPU_KV_MEMORY) - short / 2**30))
    else:
        part = short and short * config.ranks_per_gpu / torch.cuda.mem_get_info(device)[1]
        found.append(_at_most("--memory-fraction", part and config.memory_fraction - part))
    return found


def _at_most(flag: str, value: float | None) -> str:
    """ "--max-batch-tokens 812 at most"; fractions are cut, so that they are not too large."""
    if isinstance(value, float):
        value = floor(value * 1000) / 1000
    return f"{flag} {value} at most" if value and value > 0 else f"a smaller {flag}"


def _spell(count: int | None) -> str:
    return "an unknown amount" if count is None else spell_bytes(count)
