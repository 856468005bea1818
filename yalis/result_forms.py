"""What the readers of a result rely on beside its rows, written as the shape of the data, and a walk that checks it.

A form is a type; `[form]`, a list of such, and `[form, ...]` one that is not empty; `{name: form}`, an object with at
least these names, where one that ends in "?" may be missing and "*" is every name; or `(form,)`, which may be null.
"""

from __future__ import annotations

import math
from typing import Any

Form = Any


class Count:
    """A whole number above 0."""


_NAMES = {Count: "a whole number above 0", float: "a number", int: "a whole number", str: "text", dict: "an object"}

_DEVICE = {"type": str, "name": str, "threads?": Count}
_LINK = {"latency": float, "seconds_per_byte": float, "*": float}
_MODEL = {"model": str}
_SPLIT_MODEL = {"model": str, "tp?": [Count, ...], "allreduce?": str, "ranks_per_gpu?": Count}
_SHARED_MODEL = {"model": str, "ranks_per_gpu": Count}

#: Of every result.
COMMON: Form = {
    "parameters": {"engine?": dict, "dtype?": str},
    "devices": [_DEVICE],
    "host": {"cores": Count, "cpu?": str, "machine?": str, "system?": str},
    "topology": ({"ranks": Count, "ranks_per_host": [Count, ...], "launcher?": str},),
    "versions": {"*": (str,)},
    "notes": [str],
}
#: Of the parameters of each kind.
PARAMETERS: dict[str, Form] = {
    "latency": {"engine": _SPLIT_MODEL, "graph_bytes?": int},
    "throughput": {"engine": _SHARED_MODEL, "dtype": str, "answers": [str, ...]},
    "scaling": {"engine": _MODEL, "machines": [dict], "baselines": {"*": str}},
    "profile": {
        "engine": _SHARED_MODEL,
        "dtype": str,
        "workload": {"batch": Count, "prompt_len": Count, "output_len": Count},
        "split": str,
        "watching_costs": (float,),
    },
    "pipeline": {"engine": _MODEL},
    "allreduce": {
        "ranks": Count,
        "shape": str,
        "nodes": [[int, ...], ...],
        "links": [{"delay_us": (float,), "inside?": _LINK, "between?": _LINK, "fixed?": float}],
        "baseline": str,
        "ranks_per_gpu?": Count,
        "lab?": dict,
    },
    "kernels": {"dtype": str},
}


def check_form(data: dict[str, Any]) -> str:
    """What is amiss in a result, as the end of a sentence; empty where all is well."""
    kind = data["kind"]
    least = {} if kind == "scaling" else {"devices": [dict, ...]}  # a study that measured nothing knows none
    return amiss(data, COMMON) or amiss(data, {**least, "parameters": PARAMETERS[kind]})


def amiss(value: Any, form: Form, name: str = "") -> str:
    """The first thing in `value` that has not its form; empty where all is well."""
    if isinstance(form, tuple):
        return "" if value is None else amiss(value, form[0], name)
    if isinstance(form, list):
        if not isinstance(value, (list, tuple)) or (len(form) > 1 and not value):
            return f"{_told(value)} as {name!r}; it should be a list{' that is not empty' * (len(form) > 1)}"
        return next((word for one in value if (word := amiss(one, form[0], f"{name}[]"))), "")
    if isinstance(form, dict):
        return _amiss_inside(value, form, name)
    return "" if fits(value, form) else f"{_told(value)} as {name!r}; it should be {_NAMES[form]}"


def _amiss_inside(value: Any, form: dict[str, Form], name: str) -> str:
    if not isinstance(value, dict):
        return f"{_told(value)} as {name!r}; it should be an object"
    for key, wanted in form.items():
        for own in value if key == "*" else [key.removesuffix("?")]:
            path = f"{name}.{own}" if name else own
            if own not in value:
                if own == key:
                    return f"no {path!r}"
            elif word := amiss(value[own], wanted, path):
                return word
    return ""


def fits(value: Any, wanted: type) -> bool:
    """Whether it is of that type; a number must be one that arithmetic can take."""
    if isinstance(value, bool):
        return wanted is bool
    if wanted in (int, Count):
        return isinstance(value, int) and (1 if wanted is Count else -(2**63)) <= value < 2**63
    if wanted is float:
        return fits(value, int) or (isinstance(value, float) and math.isfinite(value))
    return isinstance(value, (list, tuple) if wanted is list else wanted)


def _told(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
