"""The wheel builds, contains every package, requires no certain torch, and installs a working `yalis`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.families import CASES, make_prompts, make_reference

ROOT = Path(__file__).parents[2]
#: Imported, but not required.
OPTIONAL = {
    "accelerate": "a peer engine of benchmarks, for GGUF files",
    "fastapi": "an extra, for the server",
    "httptools": "an extra, for the server",
    "huggingface_hub": "comes with transformers",
    "llguidance": "an extra, for structured outputs",
    "matplotlib": "an extra, for plots",
    "mpi4py": "an extra, for --allreduce mpi",
    "prometheus_client": "an extra, for the server",
    "pydantic": "an extra, for the server",
    "starlette": "comes with fastapi",
    "tokenizers": "comes with transformers",
    "triton": "an extra",
    "uvicorn": "an extra, for the server",
    "vllm": "a peer engine of benchmarks",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # A copy without build files, so that the wheel contains exactly the sources.
    source = folder / "source"
    sources = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]  # including untracked files
    listed = subprocess.run(sources, cwd=ROOT, capture_output=True, text=True)
    files = listed.stdout.split("\n") if listed.returncode == 0 else [str(p.relative_to(ROOT)) for p in ROOT.rglob("*")]
    for name in filter(None, files):
        if name.startswith(("yalis/", "csrc/", "pyproject", "README", "LICENSE")) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "-w",
        folder,
        source,
    ]
    subprocess.run(command, check=True)
    return next(folder.glob("yalis-*.whl"))


def test_the_wheel_contains_every_file(wheel):
    contents = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "yalis").rglob("*"):
        if path.suffix in (".py", ".c", ".css", ".html", ".js", ".json"):
            assert str(path.relative_to(ROOT)) in contents
    kernels = {name.rpartition("/share/yalis/nvrar/")[2] for name in contents}
    assert {path.name for path in (ROOT / "csrc" / "nvrar").iterdir()} <= kernels


def _metadata(wheel) -> Message:
    archive = zipfile.ZipFile(wheel)
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(archive.read(name).decode())


def _requirements(wheel) -> list[str]:
    return _metadata(wheel).get_all("Requires-Dist")


def test_the_license_is_an_spdx_expression(wheel):
    """A TOML table (License: ...) is refused by setuptools from February 2027 on."""
    metadata = _metadata(wheel)
    assert (metadata["License-Expression"], metadata["License"]) == ("Apache-2.0", None)
    assert metadata.get_all("License-File") == ["LICENSE"]


def test_torch_is_required_without_version_bounds(wheel):
    assert "torch" in _requirements(wheel), "with a bound, pip could replace the torch of a cluster"


def test_every_import_is_required_or_listed_as_optional(wheel):
    always = {re.match(r"[\w-]+", need)[0] for need in _requirements(wheel) if "extra ==" not in need}
    imported = {name for path in (ROOT / "yalis").rglob("*.py") for name in _imports(path)}
    imported -= {"yalis", "__future__"} | set(sys.stdlib_module_names)
    assert imported - always == set(OPTIONAL)
    assert always <= imported


def _imports(path: Path) -> Iterator[str]:
    """Yield the packages that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


def test_the_installed_command_works(wheel, tmp_path):
    """In a new environment that sees the dependencies of this one, but not the source tree."""
    home = tmp_path / "env"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    inside = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    Path(inside, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--quiet", wheel]
    subprocess.run(install, check=True)
    ref = make_reference(CASES[0], tmp_path, 1, make_prompts(1, (5,), shared=0), 4)
    command = [home / "bin" / "yalis", "generate", "--model", ref.path, "--device", "cpu", "--max-tokens", "4"]
    ids = ",".join(map(str, ref.prompts[0]))
    done = subprocess.run(
        [*command, "--ignore-eos", "--prompt-ids", ids, "--json"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert str(ref.tokens[0]) in done.stdout
