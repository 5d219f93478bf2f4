"""Files that are written whole: they keep who may read them, and links stay links."""

import os
import stat

import numpy as np
import pyarrow as pa
import pytest

import keyhole as kh
from keyhole._files import write_whole
from keyhole.data.writer import write_tables

pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes and links as POSIX has them")


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def save_model(path):
    sets = kh.targets.sphere_sets(20, n_keys=2, dim=2, seed=0)
    model = kh.AttentionRegressor(n_heads=2, alpha=1.0, random_state=0).fit(sets, sets.query[:, 0])
    kh.save(model, path, overwrite=True)


def write_sets(path):
    kh.data.write_parquet(path, [(kh.SetBatch(np.eye(3)[:, None, :]), np.arange(3.0))])


def write_predictions(path):
    write_tables(path, [pa.table({"prediction": [1.0, 2.0]})], overwrite=True)


WRITERS = {
    "bytes": lambda path: write_whole(b"new", path),
    "function": lambda path: write_whole(lambda draft: draft.write_bytes(b"new"), path),
    "model": save_model,
    "sets": write_sets,
    "predictions": write_predictions,
}
every_writer = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())


@every_writer
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o400])
def test_a_file_that_is_replaced_keeps_its_mode(write, mode, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(mode)
    write(path)
    assert path.read_bytes() != b"old"
    assert mode_of(path) == mode


@every_writer
def test_a_new_file_has_the_mode_of_any_new_file(write, tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    write(tmp_path / "file")
    assert mode_of(tmp_path / "file") == mode_of(tmp_path / "plain")


@every_writer
def test_a_link_is_followed(write, tmp_path):
    """What a link leads to is written, also where nothing was there before."""
    (tmp_path / "real").mkdir()
    for name, content in (("old", b"old"), ("new", None)):
        target = tmp_path / "real" / name
        if content is not None:
            target.write_bytes(content)
            target.chmod(0o600)
        link = tmp_path / f"link to {name}"
        link.symlink_to(os.path.join("real", name))
        write(link)
        assert link.is_symlink()
        assert target.is_file()
        assert not target.is_symlink()
        assert target.read_bytes() != b"old"
    assert mode_of(tmp_path / "real" / "old") == 0o600
    assert sorted(os.listdir(tmp_path / "real")) == ["new", "old"]
    assert sorted(os.listdir(tmp_path)) == ["link to new", "link to old", "real"]


def test_a_link_to_itself_is_refused(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="loop"):
        write_whole(b"new", tmp_path / "loop")
    assert os.listdir(tmp_path) == ["loop"]


def test_a_link_to_a_file_counts_as_a_file_that_is_there(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(FileExistsError, match="'link' exists"):
        write_whole(b"new", tmp_path / "link", overwrite=False)
    assert (tmp_path / "file").read_bytes() == b"old"


def test_the_draft_of_a_private_file_is_private(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o600)
    modes = []

    def write(draft):
        draft.write_bytes(b"new")
        modes.append(mode_of(draft))

    write_whole(write, path)
    assert modes == [0o600]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(draft):
        draft.write_bytes(b"ne")
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        write_whole(fail, path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_the_rights_of_a_group_are_not_given_to_another(tmp_path, monkeypatch):
    """Where the group cannot be kept, its rights go: they were not for another group."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    others = (
        [12345] if os.getuid() == 0 else [group for group in os.getgroups() if group != os.getgid()]
    )
    if not others:
        pytest.skip("no second group to give a file to")
    os.chown(path, -1, others[0])
    path.chmod(0o660)
    write_whole(b"new", path)
    assert path.stat().st_gid == others[0]
    assert mode_of(path) == 0o660

    def refused(*_):
        raise PermissionError

    monkeypatch.setattr(os, "chown", refused)
    write_whole(b"newer", path)
    assert mode_of(path) == 0o600
