"""System requirements of tests: a missing one skips the test with the reason."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

# Debian installs daemons and `ip` in folders that are not on the PATH of a normal user.
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def program(name: str) -> str:
    """Return the path of an installed program."""
    found = shutil.which(name, path=_PATH)
    if found is None:
        pytest.skip(f"{name} is not installed; tests/system/install.sh installs it as root on Debian")
    return found


def root(purpose: str) -> None:
    if os.geteuid() != 0:
        pytest.skip(f"{purpose} needs root")


def namespaces() -> None:
    """Require network namespaces, which root inside a container may not be allowed to create."""
    root("creating network namespaces")
    tried = subprocess.run([program("unshare"), "--net", "--mount", "--uts", "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"network namespaces are not allowed here ({tried.stderr.strip()})")
