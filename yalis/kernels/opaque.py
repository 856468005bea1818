"""Functions that torch.compile puts into its graphs as they are, without looking inside."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch
from torch import Tensor

P = ParamSpec("P")


def opaque(schema: str, shape: Callable[..., tuple[int, ...]]) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """A function of tensors, within compiled code the torch op yalis::<its name>.

    Its result has the dtype and device of the first argument and this `shape` of all of them. What runs inside is
    decided when it runs, so a graph that is compiled once serves any number of rows, and gives the bits that the
    function gives uncompiled.
    """

    def decorate(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
        name = function.__name__

        def run(*args: P.args, **kwargs: P.kwargs) -> Tensor:
            return function(*args, **kwargs).contiguous()  # as a compiler is told

        def like(first: Tensor, *args: object) -> Tensor:
            return first.new_empty(shape(first, *args))

        op = torch.library.custom_op(f"yalis::{name}", run, mutates_args=(), schema=schema)
        op.register_fake(like)
        compiled = getattr(torch.ops.yalis, name).default

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Tensor:
            if torch.compiler.is_compiling():
                y: Tensor = compiled(*args, **kwargs)
                return y
            return function(*args, **kwargs)

        return call

    return decorate
