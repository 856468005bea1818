"""What a scheduler counts while it plans steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SchedulerCounters:
    plans: int = 0
    chunked_prefills: int = 0  # prompt chunks that end before their prompt does
    preemptions: int = 0
    rope_switches: int = 0  # sequences recomputed because they crossed recompute_at
    prefix_hit_tokens: int = 0  # over all admissions
    prompt_query_tokens: int = 0  # looked up in the prefix cache when their request was first admitted
    prompt_hit_tokens: int = 0  # of these, tokens found
    deferrals: int = 0  # admissions put off because a plan in flight computes a block of the same prefix
    fed_tokens: int = 0  # sampled tokens that the next step read on the device
    dropped_tokens: int = 0  # sampled after the request had ended
