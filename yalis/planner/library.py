"""The interfaces of a communication library's model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from yalis.perfmodel.collectives import Shape
from yalis.planner.machine import Machine


class Library(ABC):
    """Seconds of a library's all-reduce on a machine."""

    #: Names of the parameters that the machine must have.
    required: ClassVar[tuple[str, ...]]

    @abstractmethod
    def __init__(self, machine: Machine, parameters: Mapping[str, float]) -> None: ...

    @abstractmethod
    def all_reduce(self, group: Shape, bytes: float) -> float:
        """Return the seconds until every rank of the group has the sum of messages of `bytes` bytes."""


class FullLibrary(Library):
    """A library that also gathers and sends."""

    @abstractmethod
    def all_gather(self, group: Shape, bytes_per_rank: float) -> float:
        """Return the seconds until every rank of the group has all parts."""

    @abstractmethod
    def send(self, bytes: float, same_node: bool) -> float:
        """Return the seconds of one message between two ranks, as between pipeline stages."""
