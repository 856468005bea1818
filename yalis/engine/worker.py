"""Runs ranks other than 0: joins the job, loads this rank's part of the model, serves until rank 0 closes the engine.

`python -m yalis.engine.worker` is a rank that rank 0 started itself. Under a launcher, `LLM(...)` and the command line
serve in the same way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from yalis.checkpoint.resolve import open_checkpoint
from yalis.checkpoint.tokenizer import load_tokenizer
from yalis.config import EngineConfig
from yalis.engine.engine import Engine
from yalis.engine.expert_choice import split_of
from yalis.engine.replica_ranks import ReplicaRanks, agree, agree_on_model
from yalis.engine.replicas import serve_replica
from yalis.errors import NotJoined, YalisError, YalisFailure
from yalis.launch.heartbeat import CLOSING, IDLE, LOADING, OPENING
from yalis.launch.join import join
from yalis.launch.launchers import detect_launcher
from yalis.launch.liveness import print_error
from yalis.launch.serving import report_error, serving
from yalis.launch.world import World
from yalis.sampling.grammar import GrammarCompiler
from yalis.spec import read_spec

#: The module that a rank started by rank 0 runs.
WORKER = ("yalis.engine.worker",)


def join_engine(config: EngineConfig) -> World:
    """Return the world of the ranks that this configuration needs, starting them if no launcher did."""
    world = join(split_of(config).size, WORKER, config.join_timeout, config.insecure_rendezvous)
    world.set_step_timeout(config.step_timeout)
    return world


def serve_rank(world: World, config: EngineConfig | None) -> bool:
    """Serve the next engine that rank 0 creates, until it is closed. Returns False if rank 0 creates no more.

    If `config` is None this rank uses rank 0's settings; otherwise `config` must be equal to them.
    """
    with serving(world):
        return _serve(world, config)
    return False  # rank 0 left, and serving() suppressed the broken link


def _serve(world: World, config: EngineConfig | None) -> bool:
    agreed = agree(world, config)
    if agreed is None:
        return False
    world.phase = OPENING
    checkpoint = open_checkpoint(agreed.model, agreed.load, agreed.load_seed)
    with world.progress.step():
        world.phase = LOADING
        try:
            spec = read_spec(checkpoint.config, checkpoint.label)
            eos = agree_on_model(world, checkpoint, None)
            grammars = GrammarCompiler(
                partial(load_tokenizer, checkpoint, agreed.tokenizer), spec.vocab_size, eos, checkpoint.label
            )
            ranks = ReplicaRanks(world, agreed, spec, checkpoint, eos, grammars=grammars)
        finally:
            checkpoint.close()
        to_router = world.open_links(0 if ranks.is_driver else None) if agreed.dp > 1 else {}
    try:
        if ranks.is_driver:
            serve_replica(Engine(agreed, spec, ranks, eos), to_router[0])
        else:
            ranks.serve()
    except Exception as error:
        report_error(world, error)  # first, because other ranks would report the connections that are closed below
        raise
    finally:
        ranks.close()
        for link in to_router.values():
            link.close()
    return True


@contextmanager
def lead_or_serve(config: EngineConfig) -> Iterator[bool]:
    """Yield True on the rank that runs the command: rank 0, or the only process if no launcher started others.

    Every other rank serves the engines that rank 0 creates inside its `with` block, and then yields False.
    """
    if detect_launcher().size == 1:
        yield True
        return
    world = join_engine(config)
    if world.rank > 0:
        with serving(world):
            agree(world, config)
        while serve_rank(world, None):  # a command may create engines with settings derived from `config`
            pass
        yield False
        return
    try:
        with world.progress.step():
            agree(world, config)
        yield True
        if world.failure is None:
            world.phase = CLOSING
            try:
                agree(world, None)
            except YalisFailure:
                if world.failure is not None:
                    raise  # otherwise a SIGTERM ended the other ranks first
            world.phase = IDLE
    except BaseException as error:
        world.fail(error)
        raise


def main() -> int:
    info = detect_launcher()
    try:
        world = join(info.size, WORKER)
        serve_rank(world, None)
        world.close()
    except NotJoined as error:
        print_error(str(error))
        return error.exit_code
    except YalisError as error:
        return error.exit_code  # rank 0 prints its message
    return 0


if __name__ == "__main__":
    sys.exit(main())
