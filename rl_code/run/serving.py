"""Settings of serving in a config."""

from __future__ import annotations

import dataclasses
import math

from rl_code.config.read_config import at_least
from rl_code.harness.endpoint.completions import FillInTheMiddle


@dataclasses.dataclass(frozen=True)
class TinkerConfig:
    """Settings of Tinker's API (``people.serving.tinker``). Batches have few shapes, so that few
    programs are compiled; replay needs the settings that a record was made with.
    """

    # The most rows and tokens of a batch of the trainer; a longer sequence has a batch alone.
    rows: int = 8
    tokens: int = 4096
    # The greatest rank of an adapter. All are computed with it, so a small one is not faster.
    max_rank: int = 32
    # Adapters that can be sampled at once; the least recently used one makes room.
    adapters: int = 8
    # Steps of an adapter between two snapshots, from which a restart replays.
    snapshot_steps: int = 16

    def __post_init__(self):
        at_least(self, rows=1, tokens=1, max_rank=1, adapters=1, snapshot_steps=1)


@dataclasses.dataclass(frozen=True)
class AutoConfig:
    """Settings of Thompson sampling for the model ``auto`` (``people.serving.router``)."""

    # Of the draws: the same seed and record give the same choices.
    seed: int = 0
    # Age in seconds at which an answer counts, with what was reported of it until then. All arms
    # are judged at the same age, or one whose people say sooner what they think would seem other
    # than it is. Ten minutes are the window of "re_edited", and two of the three looks at what is
    # retained lie in it.
    wait_s: float = 600.0
    # The prior of each arm's mean reward is worth ``weight`` rewards of ``mean``, and that of their
    # standard deviation lies about ``scale`` (Murphy 2007, section 3).
    mean: float = 0.0
    weight: float = 1.0
    scale: float = 1.0
    # Chance that rewards which never change seem to have changed, about, for each arm (Besson et
    # al. 2022: 1 / sqrt(T) for T sessions). None to never forget what was earned before.
    false_alarm: float | None = 0.02

    def __post_init__(self):
        at_least(self, seed=0)
        for name in ("weight", "scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if not 0 < self.wait_s < math.inf:
            raise ValueError(f"wait_s={self.wait_s} must be positive and finite")
        if not math.isfinite(self.mean):
            raise ValueError(f"mean={self.mean} must be finite")
        if self.false_alarm is not None and not 0 < self.false_alarm < 1:
            raise ValueError(
                f"false_alarm={self.false_alarm} must be above 0 and below 1, or None to never "
                "forget"
            )


@dataclasses.dataclass(frozen=True)
class ServingConfig:
    """Settings of the server for the weights of a run."""

    # Format of the prompt for filling a gap; None for a model that fills none.
    fill_in: FillInTheMiddle | None = None
    # The most requests that wait or are answered at once; others are refused with 429.
    most_requests: int = 1024
    # The most pages that all these may ask for, as a multiple of those of the engine. What has no
    # page yet waits as a list of tokens.
    pages_ahead: float = 8.0
    # Seconds that running answers have when the server is told to end; then they are cut off.
    drain_s: float = 60.0
    # Names of an agent's tools that ask the person, and that edit. They tell what an answer did
    # (``serving.counted``).
    ask_tools: tuple[str, ...] = ("ask",)
    edit_tools: tuple[str, ...] = ("write_file", "edit_file", "replace_lines")

    # MiB of files, in the folder "documents" of the workdir, for the keys of documents, which the
    # next server finds there. None for no files.
    documents_mb: float | None = None
    # Days after which such a file is removed.
    documents_days: float = 7.0

    # Of launch.serve --auto=thompson.
    auto: AutoConfig = AutoConfig()
    # Of launch.serve --api=tinker.
    tinker: TinkerConfig = TinkerConfig()

    def __post_init__(self):
        at_least(self, most_requests=1)
        if self.documents_mb is not None and not self.documents_mb > 0:
            raise ValueError(f"documents_mb={self.documents_mb} must be positive, or None")
        for name in ("pages_ahead", "drain_s", "documents_days"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
