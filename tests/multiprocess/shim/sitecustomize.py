"""Installs a fault in a test's ranks: Python imports this at startup, because the folder is on their PYTHONPATH."""

from tests.multiprocess.fault import install

install()
