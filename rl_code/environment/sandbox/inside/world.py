"""Folders in which a session's commands work: the sandbox's own, or layers of the host's store.

Layers are folders that sandboxes share; none is ever written to. The workspace is an overlay
(overlayfs) of its layers and a tmpfs of limited size, which is the session's own and takes all that
is changed. A world with layers at "/" gets another root folder: an overlay as well, with what the
sandbox adds (/proc, /dev, /tmp, the interpreter) mounted in it. Layers at "/" that have no folder
of programs hold no system: the sandbox's own is mounted among their folders.

The store is visible only while a session mounts its layers. It is covered before the first command
can start, and so is the tmpfs below the overlay. Runs inside the sandbox: standard library only.
"""

from __future__ import annotations

import os
from typing import Any

from . import kernel

# The layer store of the host, and mount points of this file's own.
STORE = "/opt/layers"
CHANGES = "/opt/changes"
ROOT = "/opt/root"
PACKAGES = "/opt/packages"
PROGRAMS = "/opt/programs"
PYTHON = "/opt/python"
WORKSPACE = "/workspace"
TEMPORARY = "/tmp"
# Mounts that a root file system of layers takes over from the sandbox.
_TAKEN_OVER = ("/dev", TEMPORARY, PYTHON, PACKAGES, PROGRAMS)
# The sandbox's own system, for a root file system that has none: folders whose entries are mounted,
# and folders or links of the root.
_SYSTEM = ("/usr",)
_SYSTEM_PARTS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc")
# Folders of the programs of a root file system, if its world names none.
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Options of the tmpfs that covers the store and the changes.
_EMPTY = "size=4k,nr_inodes=1,mode=000"


class World:
    """The folders in which one session's commands work.

    limits: "layers" (whether the store is mounted), "environment", "workspace_mb", and "inodes",
    files and folders that the changes may number.
    """

    def __init__(self, limits: dict[str, Any]):
        self._limits = limits
        # True where programs are those of another system than the sandbox's.
        self._foreign = False
        # Folders of the root, as commands see them, that the host may ask for by name.
        self._folders: list[str] = []
        # The commands' root folder, as the session sees it.
        self.root = "/"
        # The folder they start in, as they see it.
        self.workspace = WORKSPACE
        self.environment: dict[str, str] = limits["environment"]
        # Folders of Python packages, which calls can import.
        self.packages: list[str] = []
        # The upper folder of the workspace's overlay; "" where there are no layers.
        self.changes = ""
        # The workspace's layers without the changes.
        self.below = ""
        self._closed = not limits["layers"]

    @property
    def folder(self) -> str:
        """The workspace as the session sees it."""
        return os.path.join(self.root, self.workspace.lstrip("/"))

    @property
    def writable(self) -> tuple[str, str]:
        """The folders that commands may write to, as the session sees them."""
        return self.folder, os.path.join(self.root, TEMPORARY.lstrip("/"))

    def place(self, folder: str) -> str:
        """A folder that the host asks for, as the session sees it: "" for the workspace, or one of
        those that ``open`` was asked to make. Raises ValueError for another one.
        """
        if folder and folder not in self._folders:
            raise ValueError(f"the folder {folder} is none of {', '.join(self._folders) or 'none'}")
        return self.root + folder if folder else self.folder

    def close(self) -> None:
        """Covers the store and gives up the right to mount layers, if this has not happened yet.
        Raises OSError.
        """
        if not self._closed:
            kernel.mount("tmpfs", STORE, "tmpfs", kernel.MS_RDONLY, _EMPTY)
            kernel.keep_capabilities(kernel.SUPERVISING)
            self._closed = True

    def open(self, request: dict[str, Any]) -> None:
        """Mounts the layers of ``request``, before any command: "layers" ([folder in the store,
        where it is shown], the lowest first), "workspace", "environment", "folders" (of the root,
        made if they are missing; they need a layer at "/"). Raises OSError.
        """
        if self._closed:
            raise OSError("layers are mounted before anything else, in a pool that has a store")
        places: dict[str, list[str]] = {}
        for name, place in request["layers"]:
            places.setdefault(place, []).insert(0, name)
        size = f"size={self._limits['workspace_mb']}m,nr_inodes={self._limits['inodes']},mode=755"
        kernel.mount("tmpfs", CHANGES, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, size)
        self.workspace = request["workspace"]
        os.chdir(STORE)  # keeps the options short, which the kernel limits to a page
        if PACKAGES in places:
            _overlay("packages", places[PACKAGES], PACKAGES)
            self.packages.append(PACKAGES)
        if "/" in places:
            _overlay("root", places["/"], ROOT)
            self.root = ROOT
            self._foreign = any(os.path.lexists(ROOT + name) for name in ("/bin", "/usr/bin"))
            self._folders = request["folders"]
            self._complete_root()
        if self.workspace in places or "/" not in places:
            name, within = "workspace", ""
            _overlay(name, places.get(self.workspace, []), self.folder)
        else:
            name, within = "root", self.workspace
            # A mount point cannot be removed or renamed.
            kernel.mount(self.folder, self.folder, "", kernel.MS_BIND)
        _overlay_below(name, places.get("/" if within else self.workspace, []))
        # Folders stay readable through these descriptors when nothing else leads there any more.
        self.changes = f"{_kept(f'{CHANGES}/{name}')}{within}"
        self.below = f"{_kept(f'{CHANGES}/{name}.below')}{within}"
        self.environment = self._environment(request["environment"])
        os.chdir("/")
        kernel.mount("tmpfs", CHANGES, "tmpfs", kernel.MS_RDONLY, _EMPTY)
        self.close()

    def enter(self) -> None:
        """Makes the workspace the current folder, and the world's root this process's."""
        if self.root != "/":
            os.chroot(self.root)
        os.chdir(self.workspace)

    def _complete_root(self) -> None:
        """Mounts in the new root folder what commands need and layers do not hold."""
        taken_over = [*_TAKEN_OVER, *(() if self._foreign else self._own_system())]
        for name in (*taken_over, "/proc", self.workspace, *self._folders):
            _make_folder(name)
        for name in taken_over:
            if os.path.isdir(name):
                kernel.mount(name, ROOT + name, "", kernel.MS_BIND | kernel.MS_REC)

    def _own_system(self) -> list[str]:
        """Folders of the sandbox's own system that are to be mounted; makes its links. Raises
        OSError.
        """
        found = []
        for name in _SYSTEM_PARTS:
            if os.path.islink(name):
                os.symlink(os.readlink(name), ROOT + name)
            elif os.path.isdir(name):
                found.append(name)
        for name in _SYSTEM:
            with os.scandir(name) as entries:
                found += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        return found

    def _environment(self, own: dict[str, str]) -> dict[str, str]:
        """The variables of commands in this world."""
        found = dict(self._limits["environment"])
        if self._foreign:
            # The sandbox's own libraries are not those of another system.
            del found["LD_LIBRARY_PATH"]
            found["PATH"] = _PATH
        found |= own
        if self.packages:
            path = [PACKAGES, *filter(None, [found.get("PYTHONPATH")])]
            found["PYTHONPATH"] = ":".join(path)
            found["PATH"] = f"{PACKAGES}/bin:{found['PATH']}"
        return found


def _make_folder(name: str) -> None:
    """Makes a folder of the new root. Links in the layers do not lead out: what is made is made in
    ROOT itself. Raises OSError.
    """
    at = ROOT
    for part in name.split("/")[1:]:
        at = f"{at}/{part}"
        if not os.path.isdir(at) or os.path.islink(at):
            if os.path.lexists(at):
                raise OSError(f"{at.removeprefix(ROOT)} of the layers is not a folder")
            os.mkdir(at, 0o755)


def _overlay(name: str, layers: list[str], target: str) -> None:
    """Mounts layers, the highest first, over ``target``, with a folder for changes of that name."""
    for kind in ("", ".work", ".empty"):
        os.mkdir(f"{CHANGES}/{name}{kind}", 0o755)
    lower = ":".join([*layers, f"{CHANGES}/{name}.empty"])
    folders = f"upperdir={CHANGES}/{name},workdir={CHANGES}/{name}.work"
    # volatile: nothing is written to a disk, so there is nothing to wait for at the end.
    options = f"lowerdir={lower},{folders},userxattr,volatile"
    kernel.mount("overlay", target, "overlay", kernel.MS_NOSUID | kernel.MS_NODEV, options)


def _overlay_below(name: str, layers: list[str]) -> None:
    """Mounts the layers of the overlay of that name without its changes."""
    # The kernel wants two layers at least where there is nothing above them.
    folders = [f"{CHANGES}/{name}.{kind}" for kind in ("empty", "empty2", "below")]
    for folder in folders[1:]:
        os.mkdir(folder)
    options = f"lowerdir={':'.join([*layers, *folders[:2]])},userxattr"
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_RDONLY
    kernel.mount("overlay", folders[2], "overlay", flags, options)


def _kept(folder: str) -> str:
    """Another path of a folder, which is good as long as this process lives."""
    return f"/proc/self/fd/{os.open(folder, os.O_RDONLY | os.O_DIRECTORY)}"
