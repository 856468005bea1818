"""Selection of the attention backend."""

from __future__ import annotations

from yalis.attention.base import BACKENDS, AttentionBackend, AttentionNeeds
from yalis.errors import YalisError

# Order of preference. On a GPU, triton reads the paged cache in place, flash packs the keys first, and sdpa gathers and
# masks them.
ON_GPU = ("triton", "flash", "sdpa", "flex")
# On a CPU, native reads the paged cache in place, sdpa needs no C compiler, flex runs uncompiled, and triton runs in
# its interpreter, for tests.
ON_CPU = ("native", "sdpa", "flex", "triton")


def choose_backend(name: str, needs: AttentionNeeds) -> type[AttentionBackend]:
    """Return the backend `name`, or with "auto" the first in order of preference that is usable.

    Raises YalisError if the name is unknown or the backend cannot be used here.
    """
    if name == "auto":
        for candidate in ON_GPU if needs.device.type == "cuda" else ON_CPU:
            backend = BACKENDS.load(candidate)
            if backend.unusable(needs) is None:
                return backend
        raise YalisError(f"no attention backend can run this model on {needs.device}; `yalis doctor` shows why")
    if name not in BACKENDS.names():
        raise YalisError(f"unknown attention backend {name!r}; accepted: auto, {', '.join(BACKENDS.names())}")
    backend = BACKENDS.load(name)
    reason = backend.unusable(needs)
    if reason is not None:
        usable = [other for other in BACKENDS.names() if BACKENDS.load(other).unusable(needs) is None]
        raise YalisError(f"attention backend {name!r} cannot be used here: {reason}; usable: auto, {', '.join(usable)}")
    return backend
