"""What a checkpoint is to the rest of the engine: a config, names, and tensors read only where asked."""

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
    """A tensor of a checkpoint that has not been read yet. Never sees a rank: the layer asks for its slice."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def read_into(self, out: Tensor, *index: slice) -> None:
        """Copy self[index] into `out` (its dtype, its device), holding less than this tensor's size meanwhile."""

    def ranges(self, out: Tensor, index: tuple[slice, ...]) -> list[range]:
        """The elements `index` takes in each dimension; `out` must have exactly that many."""
        whole = (slice(None),) * (len(self.shape) - len(index))
        taken = [range(size)[part] for size, part in zip(self.shape, (*index, *whole), strict=True)]
        if any(part.step != 1 for part in taken) or tuple(map(len, taken)) != tuple(out.shape):
            raise ValueError(f"{self.name}: {tuple(map(len, taken))} was asked for, into {tuple(out.shape)}")
        return taken


class Checkpoint(ABC):
    """A model on disk. `config` has the keys of a Hugging Face config.json whatever the format;
    tensors carry the Hugging Face names and layouts of that config's architecture."""

    #: what to call it in a message: the path or repo id
    label: str
    config: dict[str, Any]
    #: the folder or .gguf file it was opened from, where a tokenizer may lie too
    source: Path

    @abstractmethod
    def names(self) -> Iterator[str]: ...

    @abstractmethod
    def find(self, name: str) -> LazyTensor | None: ...

    def tensor(self, name: str, shape: tuple[int, ...]) -> LazyTensor:
        """The named tensor, which must be there with this shape."""
        found = self.find(name)
        if found is None:
            raise YalisError(f"{self.label} has no tensor {name!r}, which its config asks for; fetch it again")
        if tuple(found.shape) != tuple(shape):
            raise YalisError(
                f"tensor {name!r} in {self.label} has shape {tuple(found.shape)}, but its config asks for "
                f"{tuple(shape)}; config.json and weights do not belong together"
            )
        return found

    def fingerprint(self) -> str:
        """Tells apart models that differ in config or in a tensor's name, shape or type; not in the numbers inside."""
        tensors = sorted((name, *map(str, found.shape), str(found.dtype)) for name, found in self._found())
        content = json.dumps([self.config, tensors], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def _found(self) -> Iterator[tuple[str, LazyTensor]]:
        for name in self.names():
            if (tensor := self.find(name)) is not None:
                yield name, tensor

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors taken from disk so far."""
        return 0

    def close(self) -> None:  # noqa: B027 - not every checkpoint holds files
        """Let go of open files; tensors cannot be read after this."""
