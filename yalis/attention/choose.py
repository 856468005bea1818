"""Which backend serves a model here."""

from __future__ import annotations

from yalis.attention.base import BACKENDS, AttentionBackend, AttentionNeeds
from yalis.errors import YalisError

# Best first. On a GPU our kernels read the paged cache in place; flash packs it first; sdpa gathers and masks.
ON_GPU = ("triton", "flash", "sdpa", "flex")
# On a CPU native reads the paged cache in place, sdpa needs no compiler, flex runs uncompiled, and triton in its
# interpreter is for tests.
ON_CPU = ("native", "sdpa", "flex", "triton")


def choose_backend(name: str, needs: AttentionNeeds) -> type[AttentionBackend]:
    """The backend called `name`, or with "auto" the best that can serve these needs."""
    if name == "auto":
        for candidate in ON_GPU if needs.device.type == "cuda" else ON_CPU:
            backend = BACKENDS.load(candidate)
            if backend.unusable(needs) is None:
                return backend
        raise YalisError(f"no attention backend can serve this model on {needs.device}; `yalis doctor` says why")
    if name not in BACKENDS.names():
        raise YalisError(f"unknown attention backend {name!r}; accepted: auto, {', '.join(BACKENDS.names())}")
    backend = BACKENDS.load(name)
    reason = backend.unusable(needs)
    if reason is not None:
        usable = [other for other in BACKENDS.names() if BACKENDS.load(other).unusable(needs) is None]
        raise YalisError(f"attention backend {name!r} cannot be used here: {reason}; usable: auto, {', '.join(usable)}")
    return backend
