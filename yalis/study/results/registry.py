"""All result kinds by name: every module in `kinds/` is imported, and its `ResultKind` classes are registered."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from yalis.errors import YalisError
from yalis.study.results import kinds
from yalis.study.results.kind import ResultKind
from yalis.study.results.result import Result, Row


def _find_kinds() -> dict[str, ResultKind]:
    for module in iter_modules(kinds.__path__):
        import_module(f"{kinds.__name__}.{module.name}")
    found = sorted((kind() for kind in ResultKind.__subclasses__()), key=lambda kind: kind.report_order)
    return {kind.name: kind for kind in found}


#: In the order of the report.
KINDS = _find_kinds()


def kind_named(name: str, label: str = "this result") -> ResultKind:
    """Return a kind by name. `label` names the result in the error for an unknown one."""
    if name not in KINDS:
        raise YalisError(f"{label} is of kind {name!r}; accepted: {', '.join(KINDS)}")
    return KINDS[name]


def kind_of(result: Result) -> ResultKind:
    return KINDS[result.kind]


def empty_row(kind: str) -> Row:
    """Return a row of this kind with every column null, to be filled by a benchmark."""
    return KINDS[kind].empty_row()
