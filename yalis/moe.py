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
    """The mixture of experts of a model. kernels/routed.py computes the experts and weights of a token from it."""

    num_experts: int
    top_k: int  # experts of a token
    width: int  # intermediate size of an expert
    layers: tuple[bool, ...]  # which layers have experts; the others have a dense MLP
    renormalize: bool  # divide the weights of a token by their sum
    shared_width: int = 0  # intermediate size of the expert that serves every token; 0: there is none
    shared_gate: bool = False  # the output of the shared expert is multiplied by a sigmoid of the router
    #: Scores of the experts: a softmax of all logits, a sigmoid of each, or a softmax of the chosen experts' logits.
    scoring: str = "softmax"  # softmax | sigmoid | softmax_chosen
    correction_bias: bool = False  # a bias is added to the scores for the choice, but not for the weights
    groups: int = 1  # experts are chosen from the `top_groups` best of these groups, by the sum of their best two
    top_groups: int = 1
    scale: float = 1.0  # multiplies the weights
    router_bias: bool = False
    router_fp32: bool = False  # weights and logits of the router are float32 in any compute dtype
    expert_bias: bool = False
    clamp: tuple[float, float] | None = None  # (alpha, limit) of ops.clamped_gate, which replaces the activation
    #: Names within a layer of a checkpoint with one matrix per expert. Fused tensors are always below "mlp".
    module: str = "mlp"
    router: str = "gate"
    shared: str = "shared_expert"
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    transposed: bool = False  # fused tensors have inputs before outputs, and rows of gate and up alternate (gpt-oss)

    @property
    def router_rows(self) -> int:
        """Outputs of the router: one for each expert, and one for the gate of the shared expert."""
        return self.num_experts + self.shared_gate


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
    return MoESpec(experts, top_k, width, _sparse_layers(config), config.flag("norm_topk_prob"), shared, True)


def read_qwen3_moe(config: ConfigReader) -> MoESpec:
    experts, top_k = _experts(config, 128, 8)
    width = config.integer("moe_intermediate_size", 768)
    return MoESpec(experts, top_k, width, _sparse_layers(config), config.flag("norm_topk_prob"))


def read_glm4_moe(config: ConfigReader) -> MoESpec:
    understood: dict[str, tuple[Any, ...] | None] = {
        "n_group": None, "topk_group": None, "routed_scaling_factor": None, "n_shared_experts": None,
        "first_k_dense_replace": None, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",),
    }  # fmt: skip
    experts, top_k = _experts(config, 128, 8, understood)
    groups, top_groups = _groups(config, experts, top_k)
    width, layers = config.integer("moe_intermediate_size", 1408), config.integer("num_hidden_layers")
    dense = config.count("first_k_dense_replace", 1)
    return MoESpec(
        experts, top_k, width, tuple(layer >= dense for layer in range(layers)), config.flag("norm_topk_prob"),
        shared_width=width * config.count("n_shared_experts", 1), scoring="sigmoid", correction_bias=True,
        groups=groups, top_groups=top_groups, scale=config.number("routed_scaling_factor", 1.0), router_fp32=True,
        shared="shared_experts",
    )  # fmt: skip


def read_gpt_oss_moe(config: ConfigReader) -> MoESpec:
    experts, top_k = _experts(config, 128, 4, {"swiglu_limit": None})
    return MoESpec(
        experts, top_k, config.integer("intermediate_size"), _all_layers(config), False, scoring="softmax_chosen",
        router_bias=True, expert_bias=True,
        clamp=(config.positive("swiglu_alpha", 1.702), config.positive("swiglu_limit", 7.0)),
        router="router", transposed=True,
    )  # fmt: skip


def _groups(config: ConfigReader, experts: int, top_k: int) -> tuple[int, int]:
    """Return the number of groups of experts, and of those from which a token's experts are chosen."""
    groups, chosen = config.integer("n_group", 1), config.integer("topk_group", 1)
    if experts % groups or (groups > 1 and experts // groups < 2):
        raise YalisError(
            f"n_group in {config.label} is {groups}, but the model has {experts} experts; groups must be of equal size "
            "and have at least two"
        )
    if chosen > groups or top_k > experts // groups * chosen:
        raise YalisError(
            f"topk_group in {config.label} is {chosen}; it must be at most n_group ({groups}), and so many groups must "
            f"have the {top_k} experts of a token"
        )
    return groups, chosen


def _experts(
    config: ConfigReader, experts: int, top_k: int, understood: Mapping[str, tuple[Any, ...] | None] | None = None
) -> tuple[int, int]:
    """Return the number of experts and of those that serve a token, by default the given ones.

    `understood`: keys of _UNKNOWN_FIELDS that this family has, with the values it accepts, None for any.
    """
    if unknown := list_unknown_fields(config.config, understood):
        raise YalisError(f"{config.label} has {'; '.join(unknown)}, which is not supported in this architecture")
    names = ("num_experts", "num_local_experts", "n_routed_experts")  # transformers writes several, for some families
    present = [key for key in names if config.config.get(key) is not None]
    given = {config.integer(key, maximum=MAX_EXPERTS) for key in present}
    if len(given) > 1:
        raise YalisError(f"{config.label} has {' and '.join(present)}, and they differ; remove the wrong one")
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


def list_unknown_fields(
    config: Mapping[str, Any], understood: Mapping[str, tuple[Any, ...] | None] | None = None
) -> list[str]:
    """Return the keys of a config.json that ask for mathematics that is not covered, with their values and meanings.

    `understood`: keys that are covered, with the values that are, None for any value.
    """
    found = []
    for key, (neutral, meaning) in _UNKNOWN_FIELDS.items():
        accepted = (understood or {}).get(key, neutral)
        if accepted is not None and config.get(key) is not None and config[key] not in accepted:
            found.append(f"{key} {config[key]!r} ({meaning})")
    return found
