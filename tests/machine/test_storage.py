from pathlib import Path

import pytest

from deepex.machine.storage import describe_file_system, find_mount, looks_shared, parse_mounts

MOUNTS = r"""proc /proc proc rw,nosuid,nodev,noexec,relatime 0 0
/dev/nvme0n1p2 / xfs rw,relatime,attr2,inode64 0 0
tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0
10.0.0.1@o2ib:/work /scratch lustre rw,flock,lazystatfs 0 0
nas:/home /home nfs4 rw,relatime,vers=4.2 0 0
autofs /projects autofs rw,relatime,fd=6 0 0
gpfs0 /projects gpfs rw,relatime 0 0
sshfs#me@there: /home/my\040files fuse.sshfs rw,user_id=0 0 0
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind", "shared"),
    [
        ("/scratch/me/run", "lustre", True),
        ("/scratchy", "xfs", False),
        ("/home", "nfs4", True),
        ("/home/my files/data", "fuse.sshfs", True),
        ("/projects/x", "gpfs", True),  # the later mount covers the automounter's at the same point
        ("/dev/shm/a", "tmpfs", False),
        ("/var/tmp", "xfs", False),
    ],
)
def test_the_deepest_mount_holds_a_path(path: str, kind: str, shared: bool) -> None:
    mount = find_mount(Path(path), parse_mounts(MOUNTS))
    assert mount is not None
    assert (mount.kind, looks_shared(mount.kind)) == (kind, shared)


@pytest.mark.parametrize("kind", ["beegfs", "wekafs", "ceph", "fuse.glusterfs", "panfs", "dvs", "cifs"])
def test_file_systems_of_clusters_look_shared(kind: str) -> None:
    assert looks_shared(kind)


@pytest.mark.parametrize("kind", ["ext4", "btrfs", "zfs", "overlay", "ramfs"])
def test_local_file_systems_do_not(kind: str) -> None:
    assert not looks_shared(kind)


def test_a_directory_that_does_not_exist_yet_has_its_parents_file_system(tmp_path: Path) -> None:
    found = describe_file_system(tmp_path / "a" / "b")
    assert found["directory"] == str(tmp_path.resolve())
    assert 0 < found["free_bytes"] <= found["total_bytes"]
    assert found["writable"] is True


def test_without_a_table_of_mounts_the_space_is_still_known(tmp_path: Path) -> None:
    found = describe_file_system(tmp_path, root=tmp_path)
    assert found["kind"] is found["mount"] is found["shared"] is None
    assert found["total_bytes"] > 0
