"""Rotary position embedding (RoPE), with the scaling types of the supported model families."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from yalis.kernels import ops
from yalis.rope import RopeSpec


class RopeRows(NamedTuple):
    """The rotary embedding of a step's tokens."""

    cos: Tensor  # [T, 1, dim]
    sin: Tensor  # [T, 1, dim], negated in the first half
    query_scale: Tensor | None  # [T, 1, 1], multiplies the queries


class Rotary(nn.Module):
    """Table of cosines and sines, one row [2 * dim] per position.

    Models with longrope scaling have a second table for long contexts, appended to the first. `rope_rows` of a batch
    selects the rows: the position, or position + `length` for the second table.
    """

    cos_sin: Tensor
    query_scale: Tensor | None  # [rows, 1]

    def __init__(self, spec: RopeSpec, length: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.length = length
        tables = [_table(spec, length, long) for long in ((False, True) if spec.switch_at else (False,))]
        self.register_buffer("cos_sin", torch.cat(tables).to(device=device, dtype=dtype), persistent=False)
        scale = None
        if spec.query_beta:
            turns = torch.floor(torch.arange(length) / spec.original_max)
            scale = (1 + spec.query_beta * torch.log(1 + turns)).repeat(len(tables))[:, None]
            scale = scale.to(device=device, dtype=dtype)
        self.register_buffer("query_scale", scale, persistent=False)

    def forward(self, rope_rows: Tensor) -> RopeRows:
        """Return the embedding of a batch. Called once per step; all layers with these settings use the result."""
        cos, sin = ops.gather_rows(self.cos_sin, rope_rows).unsqueeze(1).chunk(2, dim=-1)
        scale = None if self.query_scale is None else ops.gather_rows(self.query_scale, rope_rows).unsqueeze(1)
        return RopeRows(cos, sin, scale)


def _table(spec: RopeSpec, length: int, long: bool) -> Tensor:
    """Return [length, 2 * dim]: cosines, then sines. The sines of the first half are negated, as the kernels expect."""
    freqs = torch.outer(torch.arange(length, dtype=torch.float32), inverse_frequencies(spec, long))
    cos, sin = freqs.cos() * spec.scale, freqs.sin() * spec.scale
    return torch.cat((cos, cos, -sin, sin), dim=-1)


def inverse_frequencies(spec: RopeSpec, long: bool = False) -> Tensor:
    """Return the inverse frequencies, [dim / 2] float32; `long` selects the long-context factors of longrope.

    The order of operations is that of Transformers: at large positions, one ulp here changes the angle visibly.
    """
    if spec.kind == "none":
        return torch.zeros(spec.dim // 2)
    plain = 1.0 / spec.theta ** (torch.arange(0, spec.dim, 2, dtype=torch.int64).float() / spec.dim)
    if spec.kind == "default":
        return plain
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        return _llama3(plain, spec)
    if spec.kind == "yarn":
        return _yarn(plain, spec)
    stretch = torch.tensor(spec.long_factor if long else spec.short_factor, dtype=torch.float32)
    return 1.0 / (stretch * spec.theta ** (torch.arange(0, spec.dim, 2, dtype=torch.int64).float() / spec.dim))


def _llama3(plain: Tensor, spec: RopeSpec) -> Tensor:
    """Divide the frequencies of long wavelengths by `factor`, keep short ones, and interpolate in between."""
    wavelength = 2 * math.pi / plain
    blend = (spec.original_max / wavelength - spec.low) / (spec.high - spec.low)
    blended = (1 - blend) * (plain / spec.factor) + blend * plain
    out = torch.where(wavelength > spec.original_max / spec.low, plain / spec.factor, blended)
    return torch.where(wavelength < spec.original_max / spec.high, plain, out)


def _yarn(plain: Tensor, spec: RopeSpec) -> Tensor:
    """Keep frequencies of dimensions that rotate often, divide slow ones by `factor`, with a ramp in between."""

    def dimension(rotations: float) -> float:
        """Return the dimension that makes `rotations` turns over the original context length."""
        return spec.dim * math.log(spec.original_max / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.high), dimension(spec.low)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    ramp = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)).clamp(0, 1)
    return plain / spec.factor * ramp + plain * (1 - ramp)
