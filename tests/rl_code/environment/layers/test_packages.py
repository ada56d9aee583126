"""Packages come from a lock, once, and can be imported in a sandbox."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from rl_code.environment.layers import packages
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.types import Layer, World

FILES = {
    "tiny/__init__.py": "VALUE = 7\ndef main():\n    print('ran')\n",
    "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
    "tiny-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "tiny-1.0.dist-info/entry_points.txt": "[console_scripts]\ntiny = tiny:main\n",
    "tiny-1.0.dist-info/RECORD": "".join(
        f"{name},,\n" for name in ("tiny/__init__.py", "tiny-1.0.dist-info/METADATA")
    ),
}


@pytest.fixture
def lock(tmp_path, monkeypatch) -> str:
    """The lock of a package that pip finds in a folder."""
    wheel = tmp_path / "wheels" / "tiny-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return f"tiny==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}  # why\n"


def test_packages_are_built_once_and_imported(lock, tmp_path):
    store = LayerStore(tmp_path / "store")
    digest = packages.build(store, lock)
    (tmp_path / "wheels/tiny-1.0-py3-none-any.whl").unlink()
    assert packages.build(store, lock) == digest  # from the store: nothing could be installed now
    tree = store.folder / store.tree(digest)
    assert list(tree.glob("tiny/__pycache__/*.pyc"))
    assert str(tmp_path).encode() not in b"".join(
        path.read_bytes() for path in tree.rglob("*") if path.is_file()
    )
    world = World((Layer(digest, "/opt/packages"),))
    config = SandboxConfig(workers=1, memory_mb=256, layers=str(store.folder))
    files = {"s.py": "import tiny\ndef f(x):\n    return tiny.VALUE + x\n"}
    with SandboxPool(config) as pool, pool.open(files, world) as sandbox:
        done = sandbox.run(["bash", "-c", "tiny; touch /opt/packages/x"], timeout_s=60)
        assert done.stdout.startswith("ran\n"), done
        assert sandbox.call("s.py", "f", [(1,)], timeout_s=60)[0].value == 8
        assert sandbox.snapshot() == files


def test_what_is_not_pinned_is_refused(tmp_path):
    store = LayerStore(tmp_path / "store")
    for line in ("tiny==1.0", "tiny --hash=sha256:0", "--index-url=x", ""):
        with pytest.raises(packages.PackagesError, match=r"name==version|without packages"):
            packages.build(store, line)


@pytest.mark.long
def test_a_package_with_another_hash_is_refused(lock, tmp_path):
    store = LayerStore(tmp_path / "store")
    with pytest.raises(packages.PackagesError, match="DO NOT MATCH"):
        packages.build(store, "tiny==1.0 --hash=sha256:" + "0" * 64)
    assert [path.name for path in Path(store.folder).iterdir()] == ["made"]
