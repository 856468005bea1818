"""The file of `yalis serve --announce`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from yalis.errors import YalisError
from yalis.server.announce import Announcement


def test_the_file_is_private_and_appears_with_its_content(tmp_path: Path) -> None:
    path = tmp_path / "run" / "url"
    announcement = Announcement(path)
    assert not path.exists()
    announcement.publish("http://a:1")
    assert path.read_text() == "http://a:1\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(path.parent) == ["url"]
    announcement.withdraw()
    assert os.listdir(path.parent) == []
    announcement.withdraw()


def test_the_file_of_a_later_server_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "url"
    first, second = Announcement(path), Announcement(path)
    first.publish("http://a:1")
    second.publish("http://a:1")  # even if it has the same URL
    first.withdraw()
    assert path.read_text() == "http://a:1\n"
    second.withdraw()
    assert not path.exists()


def test_a_file_that_was_removed_is_no_error(tmp_path: Path) -> None:
    announcement = Announcement(tmp_path / "url")
    announcement.publish("http://a:1")
    (tmp_path / "url").unlink()
    announcement.withdraw()


def test_refused_paths(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for path, words in (
        (tmp_path, "which is a folder; give a file"),
        (tmp_path / "file" / "url", "whose folder cannot be created"),
        (tmp_path / "open" / "url", "give a file in a folder of your own"),
    ):
        with pytest.raises(YalisError, match=words):
            Announcement(path)
