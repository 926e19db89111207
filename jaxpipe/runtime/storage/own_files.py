"""Whether files can be trusted like this program itself: no other user may have written them.

Compiled programs are machine code, and jax unpickles them, so whoever writes their files runs code
in the process that loads them.
"""

import grp
import os
import pwd
import stat
from pathlib import Path


def why_not_own(path: Path) -> str:
    """Why another user may have written a file, or a file of a folder; "" if none can have.

    The file, the folder with its files, and the folders above, in which it could be replaced, must
    be this user's or root's, and writable by nobody else. Raises `OSError` if one cannot be read.
    """
    path = path.resolve()
    entries = list(os.scandir(path)) if path.is_dir() else []
    for part in (path, *(entry for entry in entries if not entry.is_symlink())):
        if reason := _fault(os.lstat(part)):
            return f"{os.fspath(part)} {reason}"
    for entry in entries:
        if entry.is_symlink():
            return f"{entry.path} is a link"
    child = os.lstat(path)
    for folder in path.parents:
        about = os.lstat(folder)
        # In a folder with the sticky bit, like /tmp, only its owner can replace an entry.
        if not about.st_mode & stat.S_ISVTX and (reason := _fault(about)):
            return f"{folder} {reason}"
        if about.st_mode & stat.S_ISVTX and not _is_mine(child.st_uid):
            return f"{folder} {_fault(child)}"
        child = about
    return ""


def _is_mine(user: int) -> bool:
    return user in (0, os.geteuid())


def _fault(about: os.stat_result) -> str:
    if not _is_mine(about.st_uid):
        return "belongs to another user"
    if about.st_mode & stat.S_IWOTH:
        return "can be written by every user"
    if about.st_mode & stat.S_IWGRP and not _is_private(about):
        return "can be written by its group"
    return ""


def _is_private(about: os.stat_result) -> bool:
    """Whether a file's group is the private one of its owner, as many systems make it."""
    try:
        owner, group = pwd.getpwuid(about.st_uid), grp.getgrgid(about.st_gid)
    except KeyError:
        return False
    return group.gr_name == owner.pw_name and not set(group.gr_mem) - {owner.pw_name}
