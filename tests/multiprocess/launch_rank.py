"""The scenarios of test_launch_*.py: `python -m tests.multiprocess.launch_rank SCENARIO SIZE [TIMEOUT]`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from yalis.errors import YalisError
from yalis.launch import rendezvous
from yalis.launch.join import join
from yalis.launch.launchers import detect_launcher
from yalis.launch.link import Link
from yalis.launch.serving import serving
from yalis.launch.world import World


def show(**values: object) -> None:
    print(json.dumps(values), flush=True)


def show_members(world: World) -> None:
    show(pids=[member.pid for member in world.members])


def communicate(world: World) -> None:
    """Gather values from all ranks, then exchange messages within two groups, twice over new links."""
    values = world.all_gather_object({"rank": world.rank, "text": "ä" * 1000})
    leader = 0 if world.rank < 2 else 2
    answers = []
    for _ in range(2):
        links = world.open_links(leader)
        if world.rank == leader:
            for rank, link in links.items():
                link.send(["to", rank, "x" * 300_000])
            answers += [[rank, link.receive()] for rank, link in links.items()]
        else:
            message = links[leader].receive()
            links[leader].send([message[1], len(message[2]), list(links)])
        for link in links.values():
            link.close()
    empty = world.open_links(None)
    everyone = world.all_gather_object(answers)
    print(f"printed by rank {world.rank}\n", end="", flush=True)  # a single write, even if Python is unbuffered
    if world.rank == 0:
        members = [[m.rank, m.host, m.node, m.local_rank, m.address] for m in world.members]
        show(ranks=[value["rank"] for value in values], answers=everyone, members=members, empty=empty)


def fan_out(world: World) -> None:
    """Rank 0 sends numbered messages of different lengths to all ranks, and then goes on until the job fails."""
    world.set_step_timeout(2)
    group = world.open_fan_out(0)
    world.phase = "running"
    if world.rank:
        with serving(world):
            numbers = [group.receive()[0] for _ in range(40)]
            group.links[0].send(numbers)
            while True:
                group.receive()
    for number in range(40):
        group.send([number, "x" * (number % 7) ** 6])
    show(received=[link.receive() for link in group.links.values()])
    show_members(world)
    for sent in range(10_000):
        if sent == 100:
            show(sent=sent)
        group.send([sent])
        time.sleep(0.01)


def wait(world: World) -> None:
    """Rank 0 waits in a collective while the others are busy."""
    world.phase = "loading the model"
    world.all_gather_object(None)
    if world.rank == 0:
        show_members(world)
        world.all_gather_object(None)
    time.sleep(100)


def serve(world: World) -> None:
    """The others serve rank 0, which does not use the world for a long time."""
    links = world.open_links(0)
    world.phase = "running"
    if world.rank:
        with serving(world):
            world.all_gather_object(None)
            links[0].receive()
        return
    world.all_gather_object(None)
    show_members(world)
    time.sleep(100)


def terminated(world: World) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    serve(world)


def idle(world: World) -> None:
    """Rank 0 survives the death of another rank, sees the failure at its next call, and has no child process left."""
    if world.rank:
        time.sleep(100)
    world.phase = "idle"
    show_members(world)
    time.sleep(6)
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        children = file.read().split()
    try:
        world.all_gather_object(None)
    except YalisError as error:
        show(error=str(error), failure=world.failure, children=children)
    world.close()
    start("gather", world.size, 30)


def gather(world: World) -> None:
    everyone = world.all_gather_object(world.rank)
    if world.rank == 0:
        show(ranks=everyone)


def fail(world: World) -> None:
    if world.rank == 2:
        world.fail("no memory left")
    wait(world)


def crash(world: World) -> None:
    if world.rank == 2:
        raise ValueError("a bug")
    wait(world)


def crash_serving(world: World) -> None:
    if world.rank == 2:
        with serving(world):
            raise ValueError("a bug")
    wait(world)


def stuck(world: World) -> None:
    """Rank 0 leaves while the others hang, as in a collective with it."""
    if world.rank:
        with serving(world):
            world.all_gather_object(None)
            time.sleep(100)
    world.all_gather_object(None)


def leave(world: World) -> None:
    """Rank 2 leaves early without an error; a later collective reports it."""
    if world.rank == 2:
        return
    if world.rank:
        with serving(world):
            world.all_gather_object(1)
    time.sleep(0.5)
    assert world.failure is None
    world.all_gather_object(0)


def unclosed(world: World) -> None:
    """Rank 0 does not close its world."""
    links = world.open_links(0)
    if world.rank:
        with serving(world):
            links[0].receive()
        raise SystemExit(0)
    show_members(world)


def reduce(world: World) -> None:
    """Rank 0 waits for a signal between two all-reduces of a gloo group."""
    import torch

    from yalis.comm.torch_dist import TorchBackend

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    backend = TorchBackend(world, torch.device("cpu"))
    group = backend.group("all", range(world.size))
    sums = []
    for _ in range(2):
        x = torch.full((2,), float(world.rank + 1))
        group.all_reduce(x)
        sums.append(x.tolist())
        if world.rank == 0 and len(sums) == 1:
            show_members(world)
            signal.sigwait({signal.SIGUSR1})
    if world.rank == 0:
        show(sums=sums)
    backend.close()


def rejoin(world: World) -> None:
    """A second engine under the same launcher."""
    world.all_gather_object(1)
    world.close()
    second = join(world.size, ["unused"])
    assert second is world
    gather(second)


def die_after_sending(link: Link, message: object) -> None:
    """Rank 0 ends after its answer to the first connection of a rank."""
    link.send(message)
    os._exit(1)


def start(scenario: str, size: int, timeout: float) -> None:
    rank = detect_launcher().rank
    if (scenario, rank) == ("absent", 2):
        time.sleep(100)
    if (scenario, rank) == ("early", 2):
        sys.exit(3)
    if (scenario, rank) == ("die", 0):
        rendezvous._try_send = die_after_sending
    if (scenario, rank) == ("version", 2):
        rendezvous.__version__ = "0.0.0.other"
    world = join(size, ["tests.multiprocess.launch_rank", scenario, str(size), str(timeout)], timeout)
    globals()[scenario](world)
    world.close()


if __name__ == "__main__":
    assert "torch" not in sys.modules
    try:
        start(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 30)
    except YalisError as error:
        sys.stderr.write(f"yalis[{detect_launcher().rank}]: {error}\n")
        sys.exit(error.exit_code)
