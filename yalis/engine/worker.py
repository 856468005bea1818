"""What ranks other than the first do: join, load their part, serve until they are sent home.

`python -m yalis.engine.worker` is a rank that rank 0 started itself; under a launcher `LLM(...)` and the command line
serve in the same way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from yalis.checkpoint.resolve import open_checkpoint
from yalis.config import EngineConfig
from yalis.engine.engine import Engine
from yalis.engine.replicas import serve_replica
from yalis.engine.team import Team, agree, agree_on_model, split_of
from yalis.errors import YalisError, YalisFailure, first_line
from yalis.launch.environment import find_place
from yalis.launch.join import join
from yalis.launch.serving import serving
from yalis.launch.world import World
from yalis.spec import read_spec

#: The module that a rank started by rank 0 runs.
WORKER = ("yalis.engine.worker",)


def serve_rank(world: World, config: EngineConfig | None) -> bool:
    """Serve rank 0's next engine; False if it makes none any more. `config` is None where this rank takes rank 0's."""
    with serving(world):
        return _serve(world, config)
    return False  # rank 0 left meanwhile


def _serve(world: World, config: EngineConfig | None) -> bool:
    settled = agree(world, config)
    if settled is None:
        return False
    checkpoint = open_checkpoint(settled.model, settled.load, settled.load_seed)
    try:
        spec = read_spec(checkpoint.config, checkpoint.label)
        eos = agree_on_model(world, checkpoint, None)
        team = Team(world, settled, spec, checkpoint, eos)
    finally:
        checkpoint.close()
    router = world.links(0 if team.is_driver else None) if settled.dp > 1 else {}
    try:
        if team.is_driver:
            serve_replica(Engine(settled, spec, team, eos), router[0])
        else:
            team.serve()
    finally:
        team.close()
        for link in router.values():
            link.close()
    return True


@contextmanager
def attend(config: EngineConfig) -> Iterator[bool]:
    """Whether this process is the one that reads requests and writes results: always, unless a launcher started others.

    Those serve here every engine that the first makes, until it leaves the block.
    """
    if find_place().size == 1:
        yield True
        return
    world = join(split_of(config).size, WORKER, config.join_timeout)
    if world.rank > 0:
        with serving(world):
            agree(world, config)
        while serve_rank(world, None):  # the command decides what engines it makes of its settings
            pass
        yield False
        return
    try:
        agree(world, config)
        yield True
        if world.failure is None:
            try:
                agree(world, None)
            except YalisFailure:
                if world.failure is not None:
                    raise  # otherwise ranks that a SIGTERM ended have left already
    except BaseException as error:
        world.fail(first_line(error) if isinstance(error, Exception) else type(error).__name__)
        raise


def main() -> int:
    place = find_place()
    try:
        world = join(place.size, WORKER)
        serve_rank(world, None)
        world.close()
    except YalisError as error:
        return error.exit_code  # rank 0 was told, and says it
    return 0


if __name__ == "__main__":
    sys.exit(main())
