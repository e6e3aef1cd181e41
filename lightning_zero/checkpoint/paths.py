"""Names in the file system: files are published atomically by a rename, and removed by one.

Note [Atomic]
    All ranks write to ``.tmp-<token>`` beside the path. When all have succeeded rank 0 exchanges it with the
    entry at the path, atomically by one rename. An old checkpoint is whole until then, and removed afterwards. A
    directory ``.tmp-*`` is left by a killed run: nothing reads it, and it can be deleted. It does not hold the path's
    name, so that nobody who looks for names takes it for a checkpoint, as Lightning for ``hpc_ckpt_<version>``. Ranks
    agree on rank 0's path and on errors. The order holds over a power cut, too: files and folders are on the disk
    before the rename, and the rename is before the old checkpoint is deleted.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

__all__ = [
    "beside",
    "check_replaceable",
    "delete",
    "local_path",
    "make_folder",
    "new_token",
    "put_in_place",
    "remove_path",
]


def local_path(path: str) -> Path:
    """Return a path of a local file system.

    Raises:
        ValueError: The path has a protocol.
    """
    if "://" in path:
        raise ValueError(
            f"`{path}` has a protocol, and directories lie in a file system that all ranks see. Use a path"
            " without one, or single files: `ZeroStrategy(state_dict_type='full')` without `async_save`."
        )
    return Path(path)


def new_token() -> str:
    """Return a random token that tells the temporary names of two runs apart."""
    return secrets.token_hex(4)


def beside(target: Path, token: str) -> Path:
    """Return the temporary name under which something for ``target`` is written."""
    return target.with_name(f".tmp-{token}")


def remove_path(path: str | os.PathLike[str], names: Sequence[str]) -> None:
    """Remove a checkpoint: a file, a directory or a link. A directory loses its name first: none is read half gone.

    Args:
        path: The checkpoint.
        names: Files to remove from a directory, with ``*`` as a wildcard, first to last. If there is something else, it
            stays in the directory, which a warning says.
    """
    target = local_path(os.fspath(path))
    others = _others(target, names)
    if others:
        for own in (own for name in names for own in sorted(target.glob(name)) if own not in others):
            own.unlink(missing_ok=True)
        warnings.warn(
            f"`{target}` was removed, except for `{others[0].name}`, which is not of the checkpoint.", stacklevel=2
        )
        return
    if _is_real_directory(target):
        doomed = beside(target, new_token())
        target.rename(doomed)
        target = doomed
    delete(target)


def delete(path: Path) -> None:
    """Delete a file, a directory or a link; nothing happens where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def check_replaceable(target: Path, names: Sequence[str]) -> None:
    """Refuse to replace a folder, and so to delete all that is in it, if it has something else than these names.

    Args:
        target: The path that will be replaced; a file, a link, or nothing may be there.
        names: Of the files that the folder may hold, with ``*`` as a wildcard.

    Raises:
        FileExistsError: It holds something else.
    """
    others = _others(target, names)
    if others:
        raise FileExistsError(
            f"`{target}` is a folder with `{others[0].name}`, which would be deleted. Choose another name, or move it"
            " away."
        )


def _others(target: Path, names: Sequence[str]) -> list[Path]:
    """Return the entries of a folder besides files with these names; none of a file or a link."""
    if not _is_real_directory(target):
        return []
    return sorted(path for path in target.iterdir() if not (path.is_file() and any(path.match(name) for name in names)))


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, and wait until they are on the disk."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync(folder.parent)


def put_in_place(temporary: Path, target: Path) -> None:
    """Make ``temporary`` the checkpoint at ``target``; the former one is then at ``temporary``, or gone."""
    if temporary.is_dir():
        for path in temporary.iterdir():
            _sync(path)
    _sync(temporary)
    old: Path | None = None
    if not os.path.lexists(target) or (temporary.is_file() and not _is_real_directory(target)):
        temporary.replace(target)
    elif not _exchange(temporary, target):
        old = beside(target, new_token())
        target.rename(old)
        try:
            temporary.rename(target)
        except BaseException:
            old.rename(target)
            raise
    _sync(target.parent)
    if old is not None:
        delete(old)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems sync no folders
            raise
    finally:
        os.close(descriptor)


def _is_real_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one step, where the system and the file system can."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if renameat2 is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2(here, os.fsencode(first), here, os.fsencode(second), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(second))
