"""Functions that torch.compile puts into its graphs as they are, without looking inside."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R", Tensor, tuple[Tensor, Tensor])
Shape = Callable[..., tuple[int, ...]]


def opaque(schema: str, *shapes: Shape) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function of tensors, within compiled code the torch op yalis::<its name>.

    Its results have the dtype and device of the first argument and these `shapes` of all of them. What runs inside is
    decided when it runs, so a graph that is compiled once serves any number of rows, and gives the bits that the
    function gives uncompiled.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__

        def run(*args: P.args, **kwargs: P.kwargs) -> Any:
            found = function(*args, **kwargs)
            # as a compiler is told
            return found.contiguous() if isinstance(found, Tensor) else tuple(one.contiguous() for one in found)

        def like(first: Tensor, *args: object) -> Any:
            made = tuple(first.new_empty(shape(first, *args)) for shape in shapes)
            return made if len(made) > 1 else made[0]

        op = torch.library.custom_op(f"yalis::{name}", run, mutates_args=(), schema=schema)
        op.register_fake(like)
        compiled = getattr(torch.ops.yalis, name).default

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling():
                found: R = compiled(*args, **kwargs)
                return found
            return function(*args, **kwargs)

        return call

    return decorate
