"""The models, machines, workloads and splits of the published study."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from yalis.config import EngineConfig
from yalis.parallel.plan import Split
from yalis.planner.job import Job, capacity
from yalis.planner.machine import Machine, load_machine
from yalis.planner.search import Candidate, Planner, is_possible
from yalis.planner.step import SimRequest
from yalis.planner.step_time import with_control
from yalis.spec import ModelSpec, read_spec
from yalis.workloads import NAMED, Workload

MACHINES = ("perlmutter", "alps")
#: GPUs of the strong-scaling curves. Fewer GPUs do not hold the weights.
GPUS = {"llama-3.1-70b": (4, 8, 16, 32), "llama-3.1-405b": (16, 32, 64, 128)}
ITEMSIZE = 2  # bf16

_LLAMA_3_1 = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-05,
    "dtype": "bfloat16",
}
#: The shapes in benchmarks/shapes, which an installed package does not have.
_CONFIGS = {
    "llama-3.1-70b": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
    "llama-3.1-405b": {
        "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
    },
}  # fmt: skip


@cache
def spec_of(model: str) -> ModelSpec:
    return read_spec({**_LLAMA_3_1, **_CONFIGS[model]}, model)


def split_of(scheme: str, gpus: int, gpus_per_node: int) -> Split:
    """Return tp over all GPUs, pp over all GPUs, or hybrid: tp in a node and pp between nodes."""
    if scheme == "tp":
        return Split(gpus)
    if scheme == "pp":
        return Split(1, 1, gpus)
    return Split(gpus_per_node, 1, gpus // gpus_per_node)


@dataclass(frozen=True)
class Setting:
    """One run of the study."""

    machine: Machine
    model: str
    workload: Workload
    split: Split
    library: str

    def job(self) -> Job:
        """Return the job as a static batch: all prompts are prefilled in one step, as in the published engine."""
        work = self.workload
        config = EngineConfig(
            max_num_seqs=work.batch, max_batch_tokens=work.batch * work.prompt_len, prefix_reuse=False
        )
        requests = [SimRequest(work.prompt_len, work.output_len)] * work.batch
        return Job(self.model, spec_of(self.model), ITEMSIZE, requests, config)


class Predictor:
    """Predicts settings; a planner for each machine, model and workload shares compute times between splits."""

    def __init__(self) -> None:
        self._planners: dict[tuple[str, str, Workload], Planner] = {}

    def planner(self, setting: Setting) -> Planner:
        key = (setting.machine.name, setting.model, setting.workload)
        if key not in self._planners:
            self._planners[key] = Planner(setting.machine, setting.job())
        return self._planners[key]

    def candidate(self, setting: Setting) -> Candidate | None:
        """Return the estimate of a setting; None if there are too few layers or too little memory."""
        planner, split = self.planner(setting), setting.split
        if not is_possible(split, planner.job.spec):
            return None
        room = capacity(planner.job, setting.machine, split)
        if not room.fits:
            return None
        nodes = -(-split.size // setting.machine.gpus_per_node)
        return Candidate(nodes, split, setting.library, room, planner.estimate(split, setting.library, room))


def poster() -> Workload:
    return NAMED["poster"]


def decode_heavy() -> Workload:
    return NAMED["decode-heavy"]


def machine_of(name: str) -> Machine:
    """Return a machine with all quantities that a step depends on."""
    return with_control(load_machine(name))


def machines() -> Sequence[Machine]:
    return [machine_of(name) for name in MACHINES]
