"""Functions that torch.compile calls as custom ops, without tracing into them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R", Tensor, tuple[Tensor, Tensor])
Shape = Callable[..., tuple[int, ...]]


def opaque(
    schema: str, *shapes: Shape, dtypes: tuple[torch.dtype, ...] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function of tensors the torch op yalis::<name> within compiled code. Elsewhere it is called directly.

    The results have the device of the first argument, the dtypes `dtypes` or that of the first argument, and the shapes
    that `shapes` return for the arguments.
    The function selects its implementation when it runs. One compiled graph therefore serves any number of rows, with
    the same bits as uncompiled code.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__

        def run(*args: P.args, **kwargs: P.kwargs) -> Any:
            result = function(*args, **kwargs)
            # Contiguous, like the tensors of the fake implementation.
            return result.contiguous() if isinstance(result, Tensor) else tuple(x.contiguous() for x in result)

        def fake(first: Tensor, *args: object) -> Any:
            kinds = dtypes or (first.dtype,) * len(shapes)
            outputs = tuple(first.new_empty(s(first, *args), dtype=d) for s, d in zip(shapes, kinds, strict=True))
            return outputs if len(outputs) > 1 else outputs[0]

        op = torch.library.custom_op(f"yalis::{name}", run, mutates_args=(), schema=schema)
        op.register_fake(fake)
        compiled = getattr(torch.ops.yalis, name).default

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling():
                result: R = compiled(*args, **kwargs)
                return result
            return function(*args, **kwargs)

        return call

    return decorate
