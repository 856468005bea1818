"""Times of communication libraries against arithmetic by hand, and what must hold on every machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from yalis.errors import YalisError
from yalis.perfmodel.collectives import Exchange, Shape, gloo_ring, rabenseifner
from yalis.planner.collective_libraries import Nvrar
from yalis.planner.communication import LIBRARIES, CommModel, libraries_of
from yalis.planner.machine import Machine, load_machine, machine_names
from yalis.planner.nccl import Estimate, Nccl
from yalis.planner.quantity import Quantity

KIB = 1 << 10
US = 1e-6
GPU_MACHINES = ("perlmutter", "alps", "h100-ib", "h200-ib")


def with_values(machine: Machine, library: str, **values: float) -> Machine:
    """Return the machine with exact values of some parameters, and only those parameters of the library."""
    parameters = {name: Quantity(value, "assumed", "test", value, value) for name, value in values.items()}
    return replace(machine, libraries={library: parameters})


NCCL = {
    "net_hop_extra_s": 0.0, "net_overhead_s": 2e-6, "net_efficiency": 1.0, "intra_efficiency": 1.0,
    "ll_intra_bytes_per_s": 87.7e9, "ll_two_nodes_bytes_per_s": 22.5e9, "ll_bytes_per_s": 19e9,
    "ll128_between_nodes": 0,
}  # fmt: skip


def nccl(**changes: float) -> Nccl:
    model = CommModel(with_values(load_machine("perlmutter"), "nccl", **{**NCCL, **changes}), "nccl").library
    assert isinstance(model, Nccl)
    return model


def find(model: Nccl, group: Shape, size: float, algorithm: str, protocol: str) -> Estimate:
    (found,) = (one for one in model.estimates(group, size) if (one.algorithm, one.protocol) == (algorithm, protocol))
    return found


def test_nccl_between_four_nodes_of_four_by_hand() -> None:
    group, size, model = Shape(4, 4), 256 * KIB, nccl()
    # Ring: 30 steps, 6 of them between nodes; the others wait for the 2 us in which the proxy posts a step.
    ring = find(model, group, size, "ring", "LL")
    assert ring.own == pytest.approx(6.6 * US + 24 * 2 * US + 6 * 2.7 * US + size / (19e9 * 16 / 30))
    simple = find(model, group, size, "ring", "Simple")
    assert simple.own == pytest.approx(1.4 * (8.4 * US + 24 * 6 * US + 6 * 14 * US) + size / (100e9 * 16 / 30))
    # Tree: 3 hops in the chain of a node and 2 between nodes, up and down. 256 KiB reaches 0.4 of the bandwidth.
    tree = find(model, group, size, "tree", "LL")
    assert tree.own == pytest.approx(6.8 * US + 2 * (3 * 0.6 + 2 * 5.0) * US + 2 * size / (19e9 * 0.4))
    assert tree.seconds == tree.own
    assert not [one for one in model.estimates(group, size) if one.protocol == "LL128"]


def test_nccl_does_not_know_what_a_network_adds_when_it_chooses() -> None:
    group, size = Shape(4, 4), 256 * KIB
    bare, slow = nccl(), nccl(net_hop_extra_s=1e-3)
    assert bare.choose(group, size).algorithm == slow.choose(group, size).algorithm == "ring"
    assert slow.all_reduce(group, size) == pytest.approx(bare.all_reduce(group, size) + 6 * 1e-3)
    tree = find(slow, group, size, "tree", "Simple")
    assert tree.seconds - tree.own == pytest.approx(4 * 2 * 1e-3)  # Simple crosses the path again to flush


def test_nccl_in_one_node_by_hand() -> None:
    model, group = nccl(), Shape(1, 4)
    ring = find(model, group, 1 << 20, "ring", "LL")
    assert ring.own == pytest.approx(6.6 * US + 6 * 0.6 * US + (1 << 20) / (87.7e9 * 4 / 6))
    ring = find(model, group, 1 << 20, "ring", "LL128")
    assert ring.own == pytest.approx(14 * US + 6 * 1.9 * US + (1 << 20) / (300e9 * 0.92 * 4 / 6))
    tree = find(model, group, 1 << 20, "tree", "LL128")  # 1 MiB reaches 0.6 of the bandwidth
    assert tree.own == pytest.approx(14 * US + 6 * 1.25 * US + 2 * (1 << 20) / (300e9 * 0.92 * 7 / 9 * 0.6))


def test_nccl_prefers_latency_for_short_and_bandwidth_for_long_messages() -> None:
    model = nccl()
    chosen = [model.choose(Shape(4, 4), size) for size in (8 * KIB, 1 << 20, 1 << 30)]
    assert [(one.algorithm, one.protocol) for one in chosen] == [("tree", "LL"), ("tree", "Simple"), ("ring", "Simple")]


def test_nccl_gathers_and_sends_by_hand() -> None:
    model = nccl(net_hop_extra_s=3e-6)
    part = 1 << 20
    expected = 8.4 * US + 12 * 6 * US + 3 * 14 * US + 16 * part / (100e9 * 16 / 15) + 3 * 2 * 3 * US
    assert model.all_gather(Shape(4, 4), part) == pytest.approx(expected)
    assert model.send(8 * KIB, same_node=True) == pytest.approx((6.6 + 0.6) * US + 8 * KIB / 150e9)
    assert model.send(64 << 20, same_node=False) == pytest.approx((8.4 + 14 + 3) * US + (64 << 20) / 25e9)


NVRAR = {
    "launches": 1, "launch_s": 5e-6, "intra_hop_s": 1e-6, "put_s": 4e-6, "put_issue_s": 0.5e-6, "ready_s": 0.0,
    "net_efficiency": 0.5, "intra_efficiency": 1.0, "intra_wire_factor": 2.0,
}  # fmt: skip


def nvrar(library: str = "nvrar", **changes: float) -> Nvrar:
    nccl, ours = (
        with_values(load_machine("perlmutter"), name, **values).libraries
        for name, values in (("nccl", NCCL), (library, {**NVRAR, **changes}))
    )
    model = CommModel(replace(load_machine("perlmutter"), libraries={**nccl, **ours}), library).library
    assert isinstance(model, Nvrar)
    return model


def test_nvrar_by_hand() -> None:
    model, group, size = nvrar(), Shape(4, 4), 1 << 20
    nvlink = 2 * 2 * 0.75 * size / 300e9  # both phases, with flags
    network = 2 * (size / 4) / 12.5e9  # two rounds of a quarter of the message
    ll = 5 * US + 2 * 1 * US + 2 * 4 * US + 2 * 3 * 0.5 * US + 2 * network + nvlink / 4
    assert model.seconds(group, size, chunks=4, ll=True) == pytest.approx(ll)
    signal = 5 * US + 2 * US + 2 * 2 * 4 * US + 2 * 1 * 0.5 * US + network + nvlink
    assert model.seconds(group, size, chunks=1, ll=False) == pytest.approx(signal)
    assert model.all_reduce(group, size) <= min(ll, signal)
    one_node = 5 * US + 2 * US + 2 * 2 * 0.75 * 8 * KIB / 300e9
    assert model.seconds(Shape(1, 4), 8 * KIB, chunks=1, ll=True) == pytest.approx(one_node)


def test_nccl_gathers_and_sends_for_nvrar() -> None:
    machine = load_machine("perlmutter")
    ours, theirs = (CommModel(machine, library) for library in ("nvrar", "nccl"))
    assert ours.all_gather(Shape(4, 4), KIB) == theirs.all_gather(Shape(4, 4), KIB)
    assert ours.send(KIB, False) == theirs.send(KIB, False)
    alone = replace(machine, libraries={"nvrar": machine.libraries["nvrar"]})
    with pytest.raises(YalisError, match="has no parameters of nccl; it has: nvrar"):
        CommModel(alone, "nvrar")


def test_published_nvrar_launches_six_times_and_waits_for_its_partner() -> None:
    group, size = Shape(4, 4), 64 * KIB
    ours, published = nvrar(), nvrar("nvrar-published", launches=6, ready_s=10e-6)
    difference = published.seconds(group, size, 1, True) - ours.seconds(group, size, 1, True)
    assert difference == pytest.approx(5 * 5 * US + 2 * 10 * US)
    assert published.protocols == (True,)


def test_gpu_initiated_puts_pay_off_in_chunks_and_a_proxy_does_not() -> None:
    """With cheap puts many chunks hide NVLink behind the network; through a slow proxy thread one chunk is best."""
    group, size = Shape(2, 4), 4 << 20
    fast, proxy = nvrar(put_issue_s=0.01e-6), nvrar(put_issue_s=50e-6)
    assert fast.seconds(group, size, 16, True) < fast.seconds(group, size, 1, True)
    assert proxy.seconds(group, size, 16, True) > proxy.seconds(group, size, 1, True)


def test_mpi_by_hand() -> None:
    values = {
        "launch_s": 10e-6, "intra_hop_s": 3e-6, "net_hop_s": 7e-6, "reduce_s": 2e-6, "net_efficiency": 1.0,
        "intra_efficiency": 1.0,
    }  # fmt: skip
    model = CommModel(with_values(load_machine("perlmutter"), "mpi", **values), "mpi")
    size = 1 << 20
    intra, net = 2 * (1 / 2 + 1 / 4) * size / 300e9, 2 * (1 / 8 + 1 / 16) * size / 25e9
    expected = 10 * US + 4 * 3 * US + 4 * 7 * US + 4 * 2 * US + intra + net
    assert model.all_reduce(Shape(4, 4), size) == pytest.approx(expected)
    gathered = 10 * US + 2 * 3 * US + 2 * 7 * US + (intra + net) / 2
    assert model.all_gather(Shape(4, 4), size / 16) == pytest.approx(gathered)
    assert model.send(size, same_node=False) == pytest.approx(17 * US + size / 25e9)


def test_rounds_of_rabenseifner_and_gloo() -> None:
    assert rabenseifner(Shape(2, 2), 800) == [
        Exchange(400, False), Exchange(200, True), Exchange(200, True), Exchange(400, False),
    ]  # fmt: skip
    three = rabenseifner(Shape(3, 1), 800)  # one rank beyond a power of two folds in and out
    assert three == [Exchange(800, True), Exchange(400, True), Exchange(400, True), Exchange(800, True)]
    assert rabenseifner(Shape(1, 1), 800) == []
    inter = gloo_ring(Shape(4, 2), 800).inter
    assert (inter.rounds, inter.messages, inter.bytes) == (28, 14, 1400)
    assert gloo_ring(Shape(1, 2), 800).inter.rounds == 0


CPU = {
    "launch_s": 5e-4, "net_hop_s": 1e-3, "byte_s": 1e-9, "intra_hop_s": 1e-4, "intra_byte_s": 1e-10,
    "shared_machine": 1.0,
}  # fmt: skip


def test_hosts_of_a_lab_by_hand() -> None:
    lab, group, size = load_machine("lab"), Shape(4, 2), 64 * KIB
    gloo = CommModel(with_values(lab, "gloo", **CPU), "gloo")
    # 14 rounds of two latencies; 4 of 8 ranks send 14/8 of the bytes to other hosts.
    assert gloo.all_reduce(group, size) == pytest.approx(5e-4 + 28e-3 + 4 * 14 / 8 * size * 1e-9)
    ours = CommModel(with_values(lab, "hierarchical", **CPU), "hierarchical")
    inside = 2 * 1e-4 + size * 1e-10
    assert ours.all_reduce(group, size) == pytest.approx(5e-4 + inside + 2e-3 + 8 * size * 1e-9)
    # Above 256 KB: recursive halving, twice the rounds.
    assert ours.all_reduce(group, 1 << 20) > 4e-3
    mpi = CommModel(with_values(lab, "mpi", **CPU, eager_bytes=65536, rendezvous_hops=3), "mpi")
    short = 5e-4 + 2 * 1e-4 + size * 1e-10 + 4e-3 + 8 * 2 * 3 / 8 * size * 1e-9
    assert mpi.all_reduce(group, size) == pytest.approx(short, rel=1e-3)
    assert mpi.all_reduce(group, 512 * KIB) > 12e-3  # all four exchanges between hosts ask first


def test_hosts_of_their_own_do_not_share_cores() -> None:
    lab, group, size = load_machine("lab"), Shape(4, 2), 1 << 20
    times = [
        CommModel(with_values(lab, "gloo", **{**CPU, "shared_machine": shared}), "gloo").all_reduce(group, size)
        for shared in (0.0, 1.0)
    ]
    assert times[0] < times[1]


@pytest.mark.parametrize("name", machine_names())
def test_more_bytes_never_take_less_time(name: str) -> None:
    machine = load_machine(name)
    for library in libraries_of(machine):
        model = CommModel(machine, library)
        for group in (Shape(1, machine.gpus_per_node), Shape(2, machine.gpus_per_node), Shape(6, 1)):
            # NCCL chooses without knowing the network, so its time may fall where it changes the algorithm.
            times = [model.all_reduce(group, size) for size in (1, 8 * KIB, 1 << 20, 64 << 20, 1 << 30)]
            assert times == sorted(times), (library, group)
            gathers = [model.all_gather(group, size) for size in (1, 64 * KIB, 1 << 20, 64 << 20)]
            assert gathers == sorted(gathers), (library, group)
        assert model.all_reduce(Shape(1, 1), 1 << 20) == model.all_gather(Shape(1, 1), 1 << 20) == 0
        assert 0 < model.send(1, True) < model.send(1 << 20, True)
        assert model.send(1 << 20, True) < model.send(1 << 20, False)


@pytest.mark.parametrize("name", GPU_MACHINES)
def test_more_nodes_never_take_less_time(name: str) -> None:
    machine = load_machine(name)
    for library in libraries_of(machine):
        model = CommModel(machine, library)
        times = [model.all_reduce(Shape(nodes, machine.gpus_per_node), 256 * KIB) for nodes in (1, 2, 4, 8, 16, 64)]
        assert times == sorted(times), library


@pytest.mark.parametrize("name", GPU_MACHINES)
def test_our_nvrar_is_faster_than_the_published_one(name: str) -> None:
    machine = load_machine(name)
    ours, published = (CommModel(machine, library) for library in ("nvrar", "nvrar-published"))
    for nodes in (2, 4, 8):
        for size in (8 * KIB, 256 * KIB, 2 << 20):
            group = Shape(nodes, machine.gpus_per_node)
            assert ours.all_reduce(group, size) < published.all_reduce(group, size)


def test_unknown_libraries_and_missing_parameters_get_a_sentence() -> None:
    machine = load_machine("perlmutter")
    with pytest.raises(YalisError, match="unknown communication library 'ncll'; accepted: nccl, mpi, nvrar"):
        CommModel(machine, "ncll")
    with pytest.raises(YalisError, match=r"perlmutter has no parameters of gloo; it has: nccl, .*`yalis calibrate`"):
        CommModel(machine, "gloo")
    with pytest.raises(YalisError, match="machine h200 has no parameters of nccl; it has: none"):
        CommModel(load_machine("h200"), "nccl")
    with pytest.raises(YalisError, match=r"unknown parameter libraries\.nccl\.hop_s; accepted: net_hop_extra_s, "):
        CommModel(with_values(machine, "nccl", **NCCL, hop_s=1e-6), "nccl")
    misspelled = replace(machine, libraries={**machine.libraries, "ncll": machine.libraries["nccl"]})
    with pytest.raises(YalisError, match=r"unknown section libraries\.ncll; accepted: nccl, mpi"):
        CommModel(misspelled, "nccl")
    partial = with_values(machine, "nccl", net_hop_extra_s=0.0)
    with pytest.raises(YalisError, match=r"has no libraries\.nccl\.net_overhead_s; add it"):
        CommModel(partial, "nccl")
    assert libraries_of(machine) == ["nccl", "mpi", "nvrar", "nvrar-published"]
    assert set(libraries_of(machine)) < set(LIBRARIES)
