"""An image's layers become a root file system: what lies over what, and what was deleted."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import py_compile
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
import zstandard

from rl_code.environment.layers import folder, image
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.pool import File, SandboxConfig, SandboxPool
from rl_code.types import Layer, World

# Packers by the ending of a media type.
PACKED = {
    "tar+gzip": gzip.compress,
    "tar+zstd": zstandard.ZstdCompressor().compress,
    "tar": lambda data: data,
}


def entry(name: str, content: bytes | str = b"", **fields) -> tuple[tarfile.TarInfo, bytes]:
    content = content.encode() if isinstance(content, str) else content
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o644
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def tarred(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for info, content in entries:
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def blob(layout: Path, data: bytes, media: str) -> dict:
    digest = hashlib.sha256(data).hexdigest()
    (layout / "blobs/sha256").mkdir(parents=True, exist_ok=True)
    (layout / "blobs/sha256" / digest).write_bytes(data)
    return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(data)}


def write_image(layout: Path, tars: list[bytes], config: dict) -> Path:
    kinds = [*PACKED][: len(tars)]
    layers = [
        blob(layout, PACKED[kind](data), f"application/vnd.oci.image.layer.v1.{kind}")
        for kind, data in zip(kinds, tars, strict=True)
    ]
    described = blob(layout, json.dumps({"config": config}).encode(), "config")
    manifest = json.dumps({"config": described, "layers": layers}).encode()
    named = blob(layout, manifest, "application/vnd.oci.image.manifest.v1+json")
    named["annotations"] = {"org.opencontainers.image.ref.name": "latest"}
    (layout / "index.json").write_text(json.dumps({"manifests": [named]}))
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return layout


def system() -> list[tuple[tarfile.TarInfo, bytes]]:
    """A shell and what it is linked with, as an image has them."""
    found = []
    for program in ("bash", "cat", "ls", "id", "touch", "mkdir", "rm", "sort"):
        found.append(entry(f"bin/{program}", Path(shutil.which(program)).read_bytes(), mode=0o755))
    machine = os.uname().machine
    folders = [Path(f"/lib/{machine}-linux-gnu"), Path("/lib64")]
    for pattern in (
        "libc.so.*",
        "libtinfo.so.*",
        "libselinux.so.*",
        "libpcre2-8.so.*",
        "ld-*.so.*",
    ):
        for place in folders:
            for path in place.glob(pattern):
                found.append(entry(str(path)[1:], path.read_bytes(), mode=0o755))
    return found


def test_modules_that_an_image_has_compiled_are_not_compiled_again(tmp_path):
    module = tmp_path / "module.py"
    module.write_text("NUMBER = 1\n")
    os.utime(module, (777, 777))
    compiled = Path(py_compile.compile(str(module)))
    name = f"lib/__pycache__/{compiled.name}"
    parts = (
        entry("lib/module.py", module.read_bytes(), mtime=777),
        entry(name, compiled.read_bytes()),
    )
    store = LayerStore(tmp_path / "store")
    layout = write_image(tmp_path / "image", [tarred(*parts)], {})
    world = image.build(store, layout)
    tree = store.folder / store.tree(world.layers[0].digest)
    assert (tree / "lib/module.py").stat().st_mtime == 0
    assert (tree / name).read_bytes()[4:12] == bytes(8)  # by its source's time, which is 0
    assert compiled.read_bytes()[4:12] == bytes(4) + (777).to_bytes(4, "little")


@pytest.mark.skipif(sys.platform != "linux", reason="programs of Linux")
def test_an_image_is_the_root_of_its_commands(tmp_path):
    first = tarred(
        *system(),
        entry("etc/os", "image"), entry("etc/hard", "", type=tarfile.LNKTYPE, linkname="etc/os"),
        entry("etc/absolute", "", type=tarfile.SYMTYPE, linkname="/etc/os"),
        entry("dev/tty", "", type=tarfile.CHRTYPE), entry("testbed/a.py", "def f():\n    return 1\n"),
        entry("testbed/old/x", "x"), entry("testbed/gone.txt", "gone"), entry("srv/a/b", "b"),
        entry("srv/c", "c"),
    )  # fmt: skip
    second = tarred(
        entry("testbed/.wh.gone.txt"), entry("testbed/old/.wh..wh..opq"), entry("testbed/old/y", "y"),
        entry("srv/.wh.a"), entry("srv/a", "", type=tarfile.DIRTYPE, mode=0o755), entry("srv/a/n", "n"),
    )  # fmt: skip
    third = tarred(entry("testbed/b.py", "b"), entry("srv/.wh.c"))
    settings = {"Env": ["PATH=/bin", "WHO=image"], "WorkingDir": "/testbed"}
    layout = write_image(tmp_path / "image", [first, second, third], settings)
    store = LayerStore(tmp_path / "store")
    world = image.build(store, layout, "latest")
    assert world == image.build(store, layout) and world.workspace == "/testbed"
    config = SandboxConfig(workers=1, memory_mb=256, layers=str(store.folder))
    script = """
cat /etc/os /etc/hard /etc/absolute; echo "$WHO $PWD"; ls /testbed old /srv /srv/a | cat
id -u; ls /proc/self/fd > /dev/null && echo proc; echo x > /tmp/t; echo changed > /etc/os; cat /etc/os
rm -r old; echo new > b.py; rm -rf /testbed 2> /dev/null; mkdir old; ls /opt/layers /workspace; ls /usr
"""
    with SandboxPool(config) as pool, pool.open({"added.py": "1\n"}, world) as sandbox:
        done = sandbox.run(["bash", "-c", script], timeout_s=60)
        lines = done.stdout.split("\n")
        assert lines[0] == "imageimageimageimage /testbed"
        assert lines[1:16] == [
            *("/srv:", "a", "", "/srv/a:", "n", "", "/testbed:", "a.py", "added.py", "b.py", "old"),
            *("", "old:", "y", "1000"),
        ], done
        assert lines[16:18] == ["proc", "changed"]
        assert "cannot access '/opt/layers'" in done.stdout
        assert "cannot access '/usr'" in done.stdout  # this system's own is not there
        files = sandbox.snapshot()
        assert {path: entry.kind for path, entry in files.items()} == {
            **dict.fromkeys(("a.py", "b.py"), "deleted"),
            "old": "replaced",
        }
        with pool.fork(sandbox) as fork:
            look = fork.run(["bash", "-c", "ls; cat /etc/os"], timeout_s=60)
            assert look.stdout == "old\nimage"
    with SandboxPool(config) as pool, pool.open({}, world) as sandbox:
        assert sandbox.call("a.py", "f", [()], timeout_s=60)[0].value == 1
    # a repository and packages of their own, in the same system
    own = tmp_path / "own"
    (own / "sub").mkdir(parents=True)
    (own / "sub/mod.py").write_text("VALUE = 5\n")
    digest = folder.build(store, own)
    layers = (*world.layers, Layer(digest, "/testbed"), Layer(digest, "/opt/packages"))
    several = World(layers, "/testbed", world.environment)
    files = {"s.py": "from sub import mod\ndef f():\n    return mod.VALUE\n"}
    script = "ls; cat /etc/os /opt/packages/sub/mod.py; echo $PYTHONPATH; rm sub/mod.py"
    with SandboxPool(config) as pool, pool.open(files, several) as sandbox:
        done = sandbox.run(["bash", "-c", script], timeout_s=60)
        assert done.stdout == "s.py\nsub\nimageVALUE = 5\n/opt/packages\n", done
        assert sandbox.snapshot() == {**files, "sub/mod.py": File(b"", 0o755, "deleted")}


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (entry("../out"), "leads out"),
        (entry("/etc/passwd"), "leads out"),
        (entry("a/../../out"), "leads out"),
        (entry(".wh..."), "leads out"),
        (entry("link/x"), "leads through"),
        (entry("link/.wh.x"), "leads through"),
        (entry("link/.wh..wh..opq"), "leads through"),
        (entry("h", type=tarfile.LNKTYPE, linkname="/etc/passwd"), "leads out"),
        (entry("h", type=tarfile.LNKTYPE, linkname="../../x"), "leads out"),
        (entry("h", type=tarfile.LNKTYPE, linkname="link/passwd"), "leads through"),
        (entry("h", type=tarfile.LNKTYPE, linkname="link"), "is no file"),
    ],
)
def test_a_layer_cannot_lead_out(tmp_path, bad, why):
    (tmp_path / "tree").mkdir()
    link = entry("link", type=tarfile.SYMTYPE, linkname="/etc")
    with pytest.raises(image.ImageError, match=why):
        image.unpack(io.BytesIO(tarred(link, bad)), tmp_path / "tree")
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]


def test_damaged_and_unknown_images_are_refused(tmp_path):
    store = LayerStore(tmp_path / "store")
    with pytest.raises(image.ImageError, match="no file oci-layout"):
        image.build(store, tmp_path)
    layout = write_image(tmp_path / "image", [tarred(entry("a", "a"))], {})
    with pytest.raises(image.ImageError, match="0 images named other"):
        image.build(store, layout, "other")
    for path in (layout / "blobs/sha256").iterdir():
        data = path.read_bytes()
        path.write_bytes(data + b"x")
        with pytest.raises(image.ImageError, match="is damaged"):
            image.build(store, layout)
        path.write_bytes(data)
    assert image.build(store, layout).workspace == "/workspace"
