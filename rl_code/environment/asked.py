"""Sections of a config that change what an episode holds, and what it keeps."""

from __future__ import annotations

import dataclasses

from rl_code.environment.documents import DocumentsConfig
from rl_code.environment.milestones import MilestonesConfig
from rl_code.environment.summaries import Closing, SummariesConfig


@dataclasses.dataclass(frozen=True)
class Asked:
    """Parts of an episode that a config asks for, beside its limits."""

    # None for contexts without documents.
    documents: DocumentsConfig | None = None
    # None for episodes of one context, but for sub-agents.
    summaries: SummariesConfig | None = None
    # The request for a last message; None for none.
    closing: Closing | None = None
    # None where milestones are not measured.
    milestones: MilestonesConfig | None = None
    # Whether ``Trajectory.test_errors`` are kept.
    test_errors: bool = False
