"""Results of benchmarks: the record, its schema, and one class per kind that defines all about it.

To add a kind, write its class in `kinds/` (see `kind.py`), fill rows from `empty_row` in a benchmark, and pass them to
`new`.
"""

from yalis.study.results.registry import KINDS, empty_row, kind_of
from yalis.study.results.result import (
    VERSION,
    Result,
    Row,
    StoredResult,
    age_key,
    describe_oversubscription,
    machine_name,
    machine_of,
    make_topology,
    model_name,
)
from yalis.study.results.storage import check, new, read, write

__all__ = [
    "KINDS",
    "VERSION",
    "Result",
    "Row",
    "StoredResult",
    "age_key",
    "check",
    "describe_oversubscription",
    "empty_row",
    "kind_of",
    "machine_name",
    "machine_of",
    "make_topology",
    "model_name",
    "new",
    "read",
    "write",
]  # fmt: skip
