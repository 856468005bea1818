"""The interface of a checkpoint: a config, and tensors by name of which only the requested slices are read."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from yalis.errors import YalisError


class LazyTensor(ABC):
    """A tensor of a checkpoint that has not been read yet. It has no notion of ranks: a layer requests its slice."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def read_into(self, out: Tensor, *index: slice) -> None:
        """Copy self[index] to `out`, converted to its dtype and device, without holding all of the tensor in memory."""

    def ranges(self, out: Tensor, index: tuple[slice, ...]) -> list[range]:
        """Return the range that `index` selects in each dimension; raises if it does not have the shape of `out`."""
        rest = (slice(None),) * (len(self.shape) - len(index))
        ranges = [range(size)[part] for size, part in zip(self.shape, (*index, *rest), strict=True)]
        if any(part.step != 1 for part in ranges) or tuple(map(len, ranges)) != tuple(out.shape):
            raise ValueError(f"{self.name}: a slice of shape {tuple(map(len, ranges))} into {tuple(out.shape)}")
        return ranges


class Checkpoint(ABC):
    """A model on disk. Whatever its format, `config` has the keys of a Hugging Face config.json, and tensors have the
    Hugging Face names and layouts of that architecture."""

    label: str  # its name in messages: the path or repo id
    config: dict[str, Any]
    is_text_part = False  # whether it has further parts, for images, which are not used
    source: Path  # the folder or .gguf file it was opened from, which may also have a tokenizer

    @abstractmethod
    def names(self) -> Iterator[str]: ...

    @abstractmethod
    def find(self, name: str) -> LazyTensor | None: ...

    def tensor(self, name: str, shape: tuple[int, ...]) -> LazyTensor:
        """Return the named tensor; raises if it is missing or has another shape."""
        found = self.find(name)
        if found is None:
            raise YalisError(f"{self.label} has no tensor {name!r}, which its config requires; fetch it again")
        if tuple(found.shape) != tuple(shape):
            raise YalisError(
                f"tensor {name!r} in {self.label} has shape {tuple(found.shape)}, but its config requires "
                f"{tuple(shape)}; config.json and weights do not belong together"
            )
        return found

    def has(self, name: str) -> bool:
        """Whether the checkpoint lists a tensor of this name."""
        return self.find(name) is not None

    def fingerprint(self) -> str:
        """Return a hash of the config and of the names, shapes and types of all tensors, but not of their values."""
        tensors = sorted((name, *map(str, found.shape), str(found.dtype)) for name, found in self._found())
        content = json.dumps([self.config, tensors], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def _found(self) -> Iterator[tuple[str, LazyTensor]]:
        for name in self.names():
            if (tensor := self.find(name)) is not None:
                yield name, tensor

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read from disk so far."""
        return 0

    def close(self) -> None:  # noqa: B027 - not every checkpoint holds files
        """Close open files; tensors cannot be read after this."""
