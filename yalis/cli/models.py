"""Models with a short name, and the families whose checkpoints can be loaded."""

from __future__ import annotations

import argparse
import json

from yalis.cli.flags import add_common_flags


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fetch", metavar="NAME", help="fetch this model now instead of on first use, and print its path"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table of families of docs/models.md")
    add_common_flags(parser, json="print one object per line")


def run(args: argparse.Namespace) -> int:
    from yalis.checkpoint.fetch import fetch_model, list_models
    from yalis.families import FAMILIES

    if args.fetch is not None:
        path = str(fetch_model(args.fetch))
        print(json.dumps({"kind": "model", "name": args.fetch, "path": path}) if args.json else path)
        return 0
    if args.markdown:
        print(family_table())
        return 0
    if args.json:
        for model in list_models():
            facts = {"name": model.name, "about": model.about, "bytes": model.size, "path": str(model.path)}
            print(json.dumps({"kind": "model", **facts, "cached": model.cached}))
        for family in FAMILIES.values():
            facts = {"name": family.name, "architecture": family.architecture, "about": family.models}
            print(json.dumps({"kind": "family", **facts}))
        return 0
    print("Models with a short name (--model NAME):")
    for model in list_models():
        state = "fetched" if model.cached else "fetched on first use"
        print(f"  {model.name:<16}{model.about}, {model.size / 1e6:.0f} MB, {state}")
    print("Families (--model FOLDER, FILE.gguf or a hub's org/name):")
    for family in FAMILIES.values():
        print(f"  {family.name:<16}{family.models} ({family.architecture})")
    return 0


def family_table() -> str:
    """Return the families as a Markdown table."""
    from yalis.families import FAMILIES

    rows = ["| family | models | GGUF architecture |", "| --- | --- | --- |"]
    for family in FAMILIES.values():
        stored = "" if family.gguf is None else f"`{family.gguf.architecture}`"
        rows.append(f"| `{family.architecture}` | {family.models} | {stored} |")
    return "\n".join(rows)
