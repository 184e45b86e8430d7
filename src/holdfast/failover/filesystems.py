"""Whether a lock on a file means the same to every process that can open it: not where the file lies on a network.

There a flock may be local to each client, or outlive its holder, or be lost when a server restarts. Always true: what
the kernel does not tell reads as an empty name, which is no network's.
"""

from __future__ import annotations

from holdfast.core.procfs import read_text

NETWORKED = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "coda", "9p", "vboxsf", "prl_fs"),
        *("ceph", "lustre", "glusterfs", "beegfs", "gpfs", "panfs", "wekafs", "orangefs", "pvfs2", "ocfs2", "gfs2"),
    }
)
# FUSE may be anything (sshfs, s3fs, gcsfuse, juicefs, …): only what is known to be one machine's disk is let in.
FUSE_LOCAL = frozenset({"fuse.fuse-overlayfs", "fuse.lxcfs"})


def filesystem_of(descriptor: int) -> str:
    """The type of the filesystem an open file lies on, by its mount: device numbers lie under overlays and btrfs."""
    mount = mount_id(read_text(f"/proc/self/fdinfo/{descriptor}") or "")
    return filesystem_type(read_text("/proc/self/mountinfo") or "", mount)


def is_networked(filesystem: str) -> bool:
    fuse = filesystem == "fuse" or filesystem.startswith("fuse.")
    return filesystem in NETWORKED or (fuse and filesystem not in FUSE_LOCAL)


def mount_id(fdinfo: str) -> str:
    """The `mnt_id` of /proc/self/fdinfo/<fd>; empty if it is not told."""
    for line in fdinfo.splitlines():
        name, _, value = line.partition(":")
        if name == "mnt_id":
            return value.strip()
    return ""


def filesystem_type(mountinfo: str, mount: str) -> str:
    """The type in the line of this mount: the first word after the lone dash; empty if there is no such line."""
    for line in mountinfo.splitlines():
        head, dash, tail = line.partition(" - ")
        if dash and head.split()[:1] == [mount] and tail.split():
            return tail.split()[0]
    return ""
