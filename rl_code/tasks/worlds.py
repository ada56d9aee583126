"""The worlds of repository tasks: a repository at a commit, over packages or over an image.

Repositories and images are folders of this machine. What a world needs is built into the layer
store once; afterwards neither the folder nor the network is used. The history that an agent sees
ends at the commit: of an image, which may hold the fix as a later commit, the folder ``.git`` is
covered by one that holds the commit's ancestors alone.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_code.environment.layers import folder, image, packages, repository
from rl_code.environment.layers.store import OPAQUE, LayerStore
from rl_code.environment.sandbox.inside.world import PACKAGES, WORKSPACE
from rl_code.types import Layer, World

_LAYOUT = "oci-layout"
# What tells the root folder of an unpacked image from a folder of something else.
_SYSTEM = ("usr", "bin", "etc")


class NoWorld(LookupError):
    """A repository or an image that is not there, or packages that cannot be installed."""


@dataclasses.dataclass(frozen=True)
class Places:
    """Places of the parts of worlds on this machine. The settings of a source that has worlds."""

    # A folder of repositories: one named as the task names it, "owner/name", or owner__name, or
    # name alone, each with or without ".git". "" for none.
    repositories: str = ""
    # A folder of images: an OCI image layout, or one that holds OCI layouts and unpacked root file
    # systems by name. "" for none.
    images: str = ""
    # Python packages that all tasks have: a lock (``environment.layers.packages``), or a folder in
    # which they are installed. pytest must be among them where no image has it. "" for none.
    packages: str = ""
    # Folder that agents work in, in an image; "" for where the image itself starts, and /testbed in
    # an unpacked one.
    workspace: str = ""

    def repository(self, name: str) -> Path | None:
        """The folder of a repository; None where no folder of repositories is named. Raises
        NoWorld.
        """
        if not self.repositories:
            return None
        owner, _, short = name.rpartition("/")
        tried = [name, f"{owner}__{short}" if owner else short, short]
        tried = [f"{one}{end}" for one in dict.fromkeys(tried) for end in ("", ".git")]
        for one in tried:
            found = Path(self.repositories) / one
            if _inside(found, self.repositories) and found.is_dir():
                return found
        raise NoWorld(f"{self.repositories} has no repository {', '.join(tried[::2])}")

    def image(self, store: LayerStore, names: Sequence[str]) -> World | None:
        """The world of the first image that there is of these names; None where no folder of images
        is named. Raises NoWorld.
        """
        if not self.images:
            return None
        at = Path(self.images)
        tried = list(dict.fromkeys(form for name in names if name for form in _forms(name)))
        for name in tried:
            try:
                if (at / _LAYOUT).is_file():
                    return image.build(store, at, name, self.workspace or None)
                if not _inside(at / name, self.images):
                    continue
                if (at / name / _LAYOUT).is_file():
                    return image.build(store, at / name, None, self.workspace or None)
            except image.ImageError as error:
                if "images named" in str(error):  # another one of the names may be there
                    continue
                raise NoWorld(str(error)) from error
            if any((at / name / part).is_dir() for part in _SYSTEM):
                layer = Layer(folder.build(store, at / name), "/")
                return World((layer,), self.workspace or "/testbed")
        raise NoWorld(f"{self.images} has no image named {', '.join(tried)}")

    def package_layers(self, store: LayerStore) -> tuple[Layer, ...]:
        """The layer of the packages that all tasks have, if there are any. Raises NoWorld."""
        if not self.packages:
            return ()
        return (packages_layer(store, self.packages),)


def packages_layer(store: LayerStore, path: str) -> Layer:
    """The layer of Python packages: of a lock, or of a folder in which they are installed. Raises
    NoWorld.
    """
    try:
        if Path(path).is_dir():
            return Layer(packages.build_installed(store, Path(path)), PACKAGES)
        return Layer(packages.build(store, Path(path).read_text()), PACKAGES)
    except (OSError, ValueError) as error:
        raise NoWorld(f"the packages of {path}: {error}") from error


def bare(store: LayerStore, places: Places, digest: str) -> World:
    """The world of a repository's layer, and of the packages. Raises NoWorld."""
    return World((Layer(digest, WORKSPACE), *places.package_layers(store)))


def over_image(
    store: LayerStore, places: Places, world: World, digest: str, changed: Mapping[str, str | None]
) -> World:
    """The world of an image whose history is that of a repository's layer.

    The image's own files stay, since it may have built some beside the sources. changed: path ->
    text of those of the repository that are to be others, None for one that is to be gone. Raises
    NoWorld.
    """
    at = world.workspace.lstrip("/")
    recipe = {"kind": "history", "repository": digest, "at": at, "changed": dict(changed)}

    def fill(tree: Path) -> None:
        source = store.folder / store.tree(digest) / ".git"
        root = tree / at
        root.mkdir(parents=True)
        shutil.copytree(source, root / ".git", symlinks=True)
        os.setxattr(root / ".git", OPAQUE, b"y")  # hides what the image has there
        for path, text in changed.items():
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if text is None:
                os.mknod(target, stat.S_IFCHR, 0)
            else:
                target.write_text(text)

    layer = Layer(store.build(recipe, fill), "/")
    return World(
        (*world.layers, layer, *places.package_layers(store)), world.workspace, world.environment
    )


def object_folders(store: LayerStore, world: World) -> list[Path]:
    """Folders of git's objects in the layers of an image, the topmost layer first."""
    at = world.workspace.lstrip("/")
    trees = [store.folder / store.tree(layer.digest) for layer in world.layers]
    folders = [tree / at / ".git" / "objects" for tree in reversed(trees)]
    return [path for path in folders if path.is_dir()]


def git_folder(store: LayerStore, world: World) -> Path | None:
    """The repository in the workspace of a world, in its topmost layer that has one."""
    for layer in reversed(world.layers):
        inner = world.workspace.lstrip("/") if layer.at == "/" else ""
        found = store.folder / store.tree(layer.digest) / inner / ".git"
        if layer.at in ("/", world.workspace) and (found / "HEAD").is_file():
            return found
    return None


def repository_layer(store: LayerStore, source: Path, commit: str) -> str:
    """Digest of the layer of a repository at a commit. Raises NoWorld."""
    try:
        return repository.build(store, source, commit)
    except repository.RepositoryError as error:
        raise NoWorld(str(error)) from error


def _forms(name: str) -> tuple[str, ...]:
    """Names that an image may have in a layout or as a folder."""
    bare = name.removesuffix(":latest")
    return name, bare, bare.replace("/", "__").replace(":", "__"), bare.rpartition("/")[2]


def _inside(path: Path, folder: str) -> bool:
    """True if a path stays in a folder: names come from a file of tasks."""
    return Path(os.path.normpath(path)).is_relative_to(os.path.normpath(folder))
