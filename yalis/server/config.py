"""The settings of a server, named like the flags of `yalis serve`."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from yalis.errors import YalisError


@dataclass(frozen=True)
class ServeConfig:
    host: str = "127.0.0.1"
    port: int = 8000  # 0: one that is free
    served_model_name: str | None = None  # the name in requests and responses; None: that of --model
    api_key_file: str | None = None  # one key per line; None: requests need no key
    cors_origin: tuple[str, ...] = ()  # origins whose pages may use the API from a browser
    announce: str | None = None  # a file that has the URL while the server accepts requests
    allowed_host: tuple[str, ...] = ()  # names in the host header, besides those of this host
    max_queue: int = 256  # completions that may wait, beyond those that run
    max_body: float = 16.0  # MiB of a request's body
    timeout: float = 60.0  # seconds for a client to send its headers or its body, or to read what was sent

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise YalisError(f"port is {self.port}; give a number from 0 (any free port) to 65535")
        if not self.host:
            raise YalisError("host is empty; give an address, such as 127.0.0.1, or 0.0.0.0 for every network")
        if self.max_queue < 0:
            raise YalisError(f"max_queue is {self.max_queue}; give a whole number of at least 0")
        for name in ("max_body", "timeout"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise YalisError(f"{name} is {value}; give a number above 0")
        for origin in self.cors_origin:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise YalisError(f"cors_origin is {origin!r}; give an origin such as https://example.org, or *")

    def name_of(self, model: str) -> str:
        """Return the name of the model in requests and responses."""
        return self.served_model_name or model

    @property
    def is_local(self) -> bool:
        """Whether only programs on this host can connect."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Return whether this is `localhost` or a loopback address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"
