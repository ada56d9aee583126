"""The layers of an image of a container, from an OCI image layout: no container daemon is needed.

    skopeo copy docker://registry/name:tag oci:/folder/of/images:tag

Each layer of the image becomes one layer of the store, so that images which share layers share
them here. What a layer deletes (files ``.wh.<name>``) becomes what overlayfs reads as deleted.
Devices and pipes are left out; the sandbox has its own. Every blob is checked against its digest.

Source: opencontainers/image-spec 1.1, image-layout.md and layer.md.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import platform
import stat
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from rl_code.environment.layers.store import OPAQUE, LayerStore
from rl_code.types import Layer, World

_WHITEOUT = ".wh."
_HIDES_ALL = ".wh..wh..opq"
_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_NAME = "org.opencontainers.image.ref.name"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# By the ending of a layer's media type: opens the tar inside. Docker writes .tar.gzip and .tar.
_OPENERS: Mapping[str, Callable[[BinaryIO], Any]] = {
    "gzip": lambda file: gzip.GzipFile(fileobj=file),
    "zstd": lambda file: zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True),
    "tar": lambda file: file,
}
_CHUNK = 1 << 20


class ImageError(ValueError):
    """An image that cannot be unpacked; the message says why."""


def build(
    store: LayerStore, layout: Path, name: str | None = None, workspace: str | None = None
) -> World:
    """The world of an image: its layers at "/", its variables.

    name: the image's name in the layout; None where there is one only. workspace: the folder that
    agents work in; None for the one that the image itself starts in. Raises ImageError.
    """
    if not (layout / "oci-layout").is_file():
        raise ImageError(f"{layout} is no OCI image layout: it has no file oci-layout")
    index = json.loads((layout / "index.json").read_text())
    manifest = _manifest(layout, index, name)
    settings = json.loads(_blob(layout, manifest["config"]).read_text()).get("config") or {}
    digests = [_build_layer(store, layout, blob) for blob in manifest["layers"]]
    folder = (workspace or settings.get("WorkingDir") or "/").rstrip("/") or "/workspace"
    variables = dict(entry.split("=", 1) for entry in settings.get("Env") or ())
    return World(tuple(Layer(digest, "/") for digest in digests), folder, variables)


def _manifest(layout: Path, index: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    """The manifest of the image for this machine."""
    found = [
        one
        for one in index["manifests"]
        if name is None or (one.get("annotations") or {}).get(_NAME) == name
    ]
    if len(found) > 1:
        own = _ARCHITECTURES.get(platform.machine(), platform.machine())
        found = [one for one in found if (one.get("platform") or {}).get("architecture") == own]
    if len(found) != 1:
        there = [(one.get("annotations") or {}).get(_NAME) for one in index["manifests"]]
        raise ImageError(
            f"{layout} has {len(found)} images named {name} for this machine, not one; it has "
            f"{there}"
        )
    content = json.loads(_blob(layout, found[0]).read_text())
    media = found[0].get("mediaType") or content.get("mediaType")
    return _manifest(layout, content, None) if media in _INDEXES else content


def _blob(layout: Path, descriptor: Mapping[str, Any]) -> Path:
    """The file of a blob, checked. Raises ImageError."""
    kind, _, digits = descriptor["digest"].partition(":")
    path = layout / "blobs" / kind / digits
    if kind != "sha256" or len(digits) != 64 or not digits.isalnum():
        raise ImageError(f"the digest {descriptor['digest']!r} of a blob must be a sha256")
    if not path.is_file():
        raise ImageError(f"{layout} lacks the blob {descriptor['digest']}")
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != digits:
        raise ImageError(f"the blob {path} is damaged: its sha256 is {found}")
    return path


def _build_layer(store: LayerStore, layout: Path, descriptor: Mapping[str, Any]) -> str:
    """Digest of the store's layer of one layer of an image."""
    media = descriptor["mediaType"]
    opener = _OPENERS.get(media.replace("+", ".").rsplit(".", 1)[-1])
    if opener is None:
        raise ImageError(f"a layer of the media type {media} cannot be read")

    def fill(tree: Path) -> None:
        with open(_blob(layout, descriptor), "rb") as file:
            unpack(opener(file), tree)

    return store.build({"kind": "image layer", "blob": descriptor["digest"]}, fill)


def unpack(stream: Any, tree: Path) -> None:
    """Unpacks the tar of a layer. Raises ImageError for an entry that leads out of ``tree``, and
    for a tar that is damaged.
    """
    deleted: list[tuple[str, ...]] = []
    try:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                parts = _parts(member.name)
                if parts and parts[-1] == _HIDES_ALL:
                    os.setxattr(_folder(tree, parts[:-1]), OPAQUE, b"y")
                elif parts and parts[-1].startswith(_WHITEOUT):
                    gone = "/".join((*parts[:-1], parts[-1].removeprefix(_WHITEOUT)))
                    deleted.append(_parts(gone))
                elif parts:
                    _place(tar, member, tree, parts)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise ImageError(f"a layer cannot be read: {error}") from error
    for parts in filter(None, deleted):
        _delete(tree, parts)


def _place(tar: tarfile.TarFile, member: tarfile.TarInfo, tree: Path, parts: tuple) -> None:
    """Puts one entry of a tar where it belongs."""
    target = _folder(tree, parts[:-1]) / parts[-1]
    there = _mode(target)
    if member.isdir():
        if not stat.S_ISDIR(there):
            _clear(target, there)
            target.mkdir()
        target.chmod(member.mode & 0o777 | stat.S_IRWXU)
        return
    if stat.S_ISDIR(there):
        raise ImageError(f"{member.name!r} is a folder and something else in one layer")
    _clear(target, there)
    if member.issym():
        target.symlink_to(member.linkname)  # only followed in the sandbox, where "/" is the image's
    elif member.islnk():
        other = _parts(member.linkname)
        source = _folder(tree, other[:-1]) / other[-1]
        if not stat.S_ISREG(_mode(source)):
            raise ImageError(f"{member.name!r} is a link to {member.linkname!r}, which is no file")
        os.link(source, target)
    elif member.isreg():
        content = tar.extractfile(member)
        assert content is not None  # of a regular file there always is one
        with content, open(target, "xb") as file:
            while chunk := content.read(_CHUNK):
                file.write(chunk)
        target.chmod(member.mode & 0o777)
        seconds = int(member.mtime) & 0xFFFFFFFF  # as a compiled module names its source's
        os.utime(target, (seconds, seconds))


def _delete(tree: Path, parts: tuple[str, ...]) -> None:
    """Notes that the layers below lose what they have at a path."""
    target = _folder(tree, parts[:-1]) / parts[-1]
    mode = _mode(target)
    if stat.S_ISDIR(mode):  # and this layer has a new folder there
        os.setxattr(target, OPAQUE, b"y")
    elif not mode:
        os.mknod(target, stat.S_IFCHR, 0)


def _parts(name: str) -> tuple[str, ...]:
    """The parts of a path in a tar. Raises ImageError for one that leads out."""
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise ImageError(f"the path {name!r} leads out of its layer")
    return parts


def _folder(tree: Path, parts: tuple[str, ...]) -> Path:
    """The folder at a path, made if it is missing. Raises ImageError where a link is on the way."""
    at = tree
    for part in parts:
        at = at / part
        mode = _mode(at)
        if not mode:
            at.mkdir()
        elif not stat.S_ISDIR(mode):
            raise ImageError(
                f"the path {'/'.join(parts)!r} leads through something else than folders"
            )
    return at


def _clear(target: Path, mode: int) -> None:
    if mode:
        target.unlink()


def _mode(path: Path) -> int:
    """Kind and rights of the entry at a path, links not followed; 0 for none."""
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return 0
