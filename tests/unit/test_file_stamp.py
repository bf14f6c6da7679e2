"""Files that are read again when they change: content, rights, replaced files, links with new targets."""

import os
from pathlib import Path

from kvatlas.file_stamp import MISSING, file_stamp


def test_a_stamp_changes_with_all_that_matters_and_with_nothing_else(tmp_path: Path) -> None:
    path, other, link = tmp_path / "secret", tmp_path / "other", tmp_path / "link"
    path.write_text("one")
    other.write_text("one")
    path.chmod(0o600)
    link.symlink_to(path)
    stamps = [file_stamp(link)]
    assert path.read_text() == "one"
    assert file_stamp(link) == stamps[0], "reading changes nothing"
    path.chmod(0o644)
    stamps.append(file_stamp(link))
    path.write_text("two, longer")
    stamps.append(file_stamp(link))
    os.replace(other, path)
    stamps.append(file_stamp(link))
    link.unlink()
    stamps.append(file_stamp(link))
    assert len(set(stamps)) == 5
    assert stamps[-1] == MISSING
