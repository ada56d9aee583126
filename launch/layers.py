"""Puts layers for the worlds of tasks into a layer store, and prints the world.

    python -m launch.layers folder <folder>                  # as it is
    python -m launch.layers packages <lock>                  # name==version --hash=sha256:...
    python -m launch.layers repository <repository> <commit>
    python -m launch.layers image <OCI layout> [<name>]
    python -m launch.layers verify <digest>                  # reads a layer again

The store is the folder --store, which a config names as sandbox.layers. A layer that is there
already is not built again. What is printed is JSON for the column ``world`` of a file of tasks; the
layers of several commands may be put together in one world.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from absl import flags

from launch import command, endings
from rl_code.environment.layers import folder, image, packages, repository
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.inside.world import PACKAGES, WORKSPACE
from rl_code.types import Layer, World

# By kind: how many words follow it, at least and at most.
_WORDS = {
    "folder": (1, 1),
    "packages": (1, 1),
    "repository": (2, 2),
    "image": (1, 2),
    "verify": (1, 1),
}


def main(argv: list[str]) -> None:
    kind, *words = argv[1:] or [""]
    least, most = _WORDS.get(kind, (1, 0))
    if not least <= len(words) <= most:
        command.refuse(
            f"expected one of {', '.join(_WORDS)} and what it takes, found {' '.join(argv[1:])!r}; "
            "--help shows them"
        )
    store = LayerStore(flags.FLAGS.store)
    try:
        world = build(store, kind, words)
    except UnicodeDecodeError as error:
        command.refuse(f"{' '.join(words)}: expected text in UTF-8: {error}")
    except (ValueError, LookupError) as error:
        command.refuse(str(error))
    except OSError as error:
        words, _ = endings.ending(error) or (str(error), 2)
        command.refuse(words)
    if world is not None:
        print(json.dumps(dataclasses.asdict(world), indent=1))
        for layer in world.layers:
            manifest = store.manifest(layer.digest)
            command.console().print(
                f"{layer.digest}: {manifest.entries} entries, {manifest.bytes / 1e6:.1f} MB",
                highlight=False,
            )


def build(store: LayerStore, kind: str, words: list[str]) -> World | None:
    """The world of what the words name; None for what only checks."""
    first = words[0]
    match kind:
        case "folder":
            return World((Layer(folder.build(store, Path(first)), WORKSPACE),))
        case "packages":
            return World((Layer(packages.build(store, Path(first).read_text()), PACKAGES),))
        case "repository":
            return World((Layer(repository.build(store, Path(first), words[1]), WORKSPACE),))
        case "image":
            name = words[1] if words[1:] else None
            return image.build(store, Path(first), name, flags.FLAGS.workspace)
    store.verify(first)
    return None


def define_flags() -> None:
    """One is required, which would refuse every other command of a process that imports this."""
    flags.DEFINE_string("store", None, "The folder of the layer store.", required=True)
    flags.DEFINE_string(
        "workspace", None, "Where agents work, of image; else where the image itself starts."
    )


if __name__ == "__main__":
    define_flags()
    command.run(main, arguments=True)
