"""Files and folders that are whole or not there."""

import pytest

from fusion_bench_nufilt.utils import files


def test_a_folder_that_a_killed_process_began_is_not_foreign(tmp_path):
    for name in (files.LOCK, ".compare.json-123", "moments"):
        (tmp_path / name).touch()
        files.refuse_foreign(tmp_path, "compare.json", ["moments"])
    with pytest.raises(ValueError, match=r"it has 'moments' and no compare\.json"):
        files.refuse_foreign(tmp_path, "compare.json")


@pytest.mark.parametrize("name", ["notes.txt", ".compare.json-123", "moments"])
def test_a_folder_of_somebody_else_is_foreign(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"it has '.*' and no compare\.json"):
        files.refuse_foreign(tmp_path, "compare.json", ["moments"])


@pytest.mark.parametrize("out", ["file", "file/out", "file/new/out"])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, out):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"'.*file' is no folder that can be written to"):
        files.refuse_foreign(tmp_path / out, "compare.json")
    files.refuse_foreign(tmp_path / "new" / "out", "compare.json")
    assert not (tmp_path / "new").exists()
