"""Serve a model over HTTP with the OpenAI API, and a chat page. Ctrl-C, SIGTERM or SIGUSR1 finishes what runs, a second
one stops. Needs the extra `serve`: pip install 'yalis[serve]'."""

from __future__ import annotations

import argparse
import signal
from contextlib import nullcontext
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from yalis.cli.flags import add_debug_flag, add_engine_flags, engine_config
from yalis.cli.loading import load_llm
from yalis.cli.signals import USER_SIGNAL, sigusr1_as_sigterm
from yalis.cli.terminal import print_status
from yalis.config import EngineConfig
from yalis.errors import YalisError
from yalis.progress_line import ProgressLine
from yalis.server.announce import Announcement
from yalis.server.config import ServeConfig

#: Help texts of the flags, which are the fields of ServeConfig; and what the help shows for their values.
_HELP = {
    "host": ("ADDRESS", "address to listen on; 0.0.0.0 for every network"),
    "port": ("N", "port to listen on; 0 for any free one"),
    "served_model_name": ("NAME", "name of the model in requests and responses (default: that of --model)"),
    "api_key_file": ("FILE", "file with the accepted API keys, one per line, that only you can read"),
    "announce": ("FILE", "write the URL to this file once requests are accepted, and remove it when no more are"),
    "cors_origin": ("ORIGIN", "origin whose pages may use the API from a browser; may be given several times"),
    "allowed_host": ("NAME", "name that clients may use for this host, if it listens on localhost behind a proxy"),
    "max_queue": ("N", "completions that may wait, beyond those that run; more requests get status 429"),
    "max_body": ("MIB", "largest body of a request"),
    "timeout": ("SECONDS", "time for a client to send headers or a body, or to read what was sent"),
}
_TYPES: dict[str, Any] = {"int": int, "float": float}


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    for field in fields(ServeConfig):
        metavar, help_text = _HELP[field.name]
        options: dict[str, Any] = {"metavar": metavar, "dest": field.name, "default": argparse.SUPPRESS}
        if str(field.type).startswith("tuple"):
            options["action"] = "append"
        else:
            options["type"] = _TYPES.get(str(field.type), str)
        if field.default not in (None, ()):
            default = f"{field.default:g}" if isinstance(field.default, float) else field.default
            help_text += f" (default: {default})"
        group.add_argument(f"--{field.name.replace('_', '-')}", help=help_text, **options)
    add_engine_flags(parser)
    add_debug_flag(parser)
    parser.set_defaults(drains_on_sigusr1=True)


def run(args: argparse.Namespace) -> int:
    with sigusr1_as_sigterm() as drained:
        try:
            _serve(engine_config(args), _serve_config(args))
        except KeyboardInterrupt:
            if not drained:
                raise
    return USER_SIGNAL if drained else 0


def _serve(config: EngineConfig, serve: ServeConfig) -> None:
    _check_installed()  # before the imports below
    from yalis.server.keys import read_keys
    from yalis.server.lifecycle import Server, bind, url_of

    keys = read_keys(serve.api_key_file)
    announcement = None if serve.announce is None else Announcement(Path(serve.announce))
    if not serve.is_local and not keys.required:
        print_status(f"everybody who can reach {serve.host} can use this server; --api-key-file protects it")
    with bind(serve) as listener:
        with ProgressLine() as line:
            loaded = load_llm(config, line)
        with loaded as llm:
            server = Server(llm, serve, keys, listener)
            url = url_of(listener)
            with announcement or nullcontext():
                server.run(
                    on_ready=lambda: _report_ready(f"serving {config.model} on {url}", url, announcement),
                    on_drain=announcement.withdraw if announcement else lambda: None,
                )
    if server.stopped and server.last_signal is not None:
        signal.raise_signal(server.last_signal)  # for the exit status of that signal


def _report_ready(message: str, url: str, announcement: Announcement | None) -> None:
    if announcement is not None:
        announcement.publish(url)
    print_status(message)


def _serve_config(args: argparse.Namespace) -> ServeConfig:
    given = {field.name: getattr(args, field.name) for field in fields(ServeConfig) if hasattr(args, field.name)}
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return ServeConfig(**values)


def _check_installed() -> None:
    missing = [name for name in ("fastapi", "uvicorn", "httptools", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise YalisError(f"the server needs {', '.join(missing)}; install it with pip install 'yalis[serve]'")
