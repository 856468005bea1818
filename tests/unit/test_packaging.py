"""The wheel: it builds, holds every room, asks for no particular torch, and gives a working `yalis`."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.families import CASES, make_prompts, make_reference

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # A copy without build leftovers, so that the wheel holds what the sources hold.
    source = folder / "source"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    files = listed.stdout.split("\n") if listed.returncode == 0 else [str(p.relative_to(ROOT)) for p in ROOT.rglob("*")]
    for name in filter(None, files):
        if name.startswith(("yalis/", "pyproject", "README", "LICENSE")) and (ROOT / name).is_file():
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


def test_wheel_holds_every_file(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "yalis").rglob("*"):
        if path.suffix in (".py", ".c"):
            assert str(path.relative_to(ROOT)) in held


def test_any_torch_is_kept(wheel):
    packed = zipfile.ZipFile(wheel)
    name = next(name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
    needs = Parser().parsestr(packed.read(name).decode()).get_all("Requires-Dist")
    assert "torch" in needs, "a bound on torch would let pip replace the one a cluster chose"


def test_installed_command_works(wheel, tmp_path):
    """Installed into an environment of its own, which sees this one's dependencies but not the sources."""
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
