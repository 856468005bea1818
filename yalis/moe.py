"""Mixture of experts as settings: which layers have experts, how tokens are routed, and the names of the tensors.

A config whose routing is not covered is refused by the name of the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from yalis.config_reader import ConfigReader
from yalis.errors import YalisError

#: Each expert has matrices, and a layer with many takes long to build before its first weight is read.
MAX_EXPERTS = 4096


@dataclass(frozen=True)
class MoESpec:
    """The mixture of experts of a model. A token's weights are the `top_k` largest of a softmax over all experts.

    With `renormalize` they are divided by their sum, which is the same as a softmax over the chosen experts alone.
    """

    num_experts: int
    top_k: int  # experts of a token
    width: int  # intermediate size of an expert
    layers: tuple[bool, ...]  # which layers have experts; the others have a dense MLP
    renormalize: bool
    shared_width: int = 0  # intermediate size of the expert that serves every token; 0: there is none
    #: Names within a layer of a checkpoint with one matrix per expert. Fused tensors are always below "mlp".
    module: str = "mlp"
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    @property
    def router_rows(self) -> int:
        """Outputs of the router: one for each expert, and one for the gate of the shared expert."""
        return self.num_experts + (self.shared_width > 0)


def read_mixtral_moe(config: ConfigReader) -> MoESpec:
    experts, top_k = _experts(config, 8, 2)
    width = config.integer("intermediate_size")
    names = ("w1", "w3", "w2")
    return MoESpec(experts, top_k, width, _all_layers(config), True, module="block_sparse_moe", matrices=names)


def read_olmoe_moe(config: ConfigReader) -> MoESpec:
    experts, top_k = _experts(config, 64, 8)
    width = config.integer("intermediate_size")
    return MoESpec(experts, top_k, width, _all_layers(config), config.flag("norm_topk_prob"))


def read_qwen2_moe(config: ConfigReader) -> MoESpec:
    experts, top_k = _experts(config, 60, 4)
    width, shared = (
        config.integer("moe_intermediate_size", 1408),
        config.integer("shared_expert_intermediate_size", 5632),
    )
    return MoESpec(experts, top_k, width, _sparse_layers(config), config.flag("norm_topk_prob"), shared)


def read_qwen3_moe(config: ConfigReader) -> MoESpec:
    experts, top_k = _experts(config, 128, 8)
    width = config.integer("moe_intermediate_size", 768)
    return MoESpec(experts, top_k, width, _sparse_layers(config), config.flag("norm_topk_prob"))


def _experts(config: ConfigReader, experts: int, top_k: int) -> tuple[int, int]:
    """Return the number of experts and of those that serve a token, by default the given ones."""
    if unknown := list_unknown_fields(config.config):
        raise YalisError(f"{config.label} has {'; '.join(unknown)}, which is not supported in this architecture")
    names = ("num_experts", "num_local_experts")  # transformers writes either, for some families
    given = {config.integer(key, maximum=MAX_EXPERTS) for key in names if config.config.get(key) is not None}
    if len(given) > 1:
        raise YalisError(f"{config.label} has {' and '.join(names)}, and they differ; remove the wrong one")
    experts = given.pop() if given else experts
    chosen = config.integer("num_experts_per_tok", top_k)
    if chosen > experts:
        raise YalisError(
            f"num_experts_per_tok in {config.label} is {chosen}, but the model has {experts} experts; it must be at "
            f"most {experts}"
        )
    return experts, chosen


def _all_layers(config: ConfigReader) -> tuple[bool, ...]:
    return (True,) * config.integer("num_hidden_layers")


def _sparse_layers(config: ConfigReader) -> tuple[bool, ...]:
    dense, step = config.config.get("mlp_only_layers") or [], config.integer("decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise YalisError(f"mlp_only_layers in {config.label} is {dense!r}; it must be a list of layer numbers")
    layers = range(config.integer("num_hidden_layers"))
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers)


#: Keys of config.json that change the mathematics in a way that no field describes, the values that leave it as it is
#: (besides null), and what other values ask for.
_UNKNOWN_FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "scoring_func": (("softmax",), "another router than softmax"),
    "score_func": (("softmax",), "another router than softmax"),
    "moe_router_activation_func": (("softmax",), "another router than softmax"),
    "use_expert_bias": ((False,), "a bias that corrects the choice of experts"),
    "moe_router_enable_expert_bias": ((False,), "a bias that corrects the choice of experts"),
    "topk_method": (("greedy",), "a choice of experts by groups or with a correction bias"),
    "n_group": ((0, 1), "a choice of experts by groups"),
    "num_expert_group": ((0, 1), "a choice of experts by groups"),
    "topk_group": ((0, 1), "a choice of experts by groups"),
    "routed_scaling_factor": ((1, 1.0), "a scaling factor of the routed experts"),
    "n_shared_experts": ((0,), "shared experts without a gate"),
    "num_shared_experts": ((0,), "shared experts without a gate"),
    "first_k_dense_replace": ((0,), "dense first layers"),
    "kv_lora_rank": ((), "multi-head latent attention"),
    "q_lora_rank": ((), "multi-head latent attention"),
    "swiglu_limit": ((), "a clamped activation"),
    "clip_qkv": ((), "clamped queries, keys and values"),
    "linear_num_key_heads": ((), "linear attention"),
}


def list_unknown_fields(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a config.json that ask for mathematics that is not covered, with their values and meanings."""
    return [
        f"{key} {config[key]!r} ({meaning})"
        for key, (neutral, meaning) in _UNKNOWN_FIELDS.items()
        if config.get(key) is not None and config[key] not in neutral
    ]
