"""Errors of sandboxes, which say whose failure it is.

Users of sandboxes meet these errors, and no others:

  SandboxUnavailable  No sandbox works on this machine. Raised when a pool is made.
  SandboxFault        The host could not run a sandbox, and no code of a candidate can have caused
                      it: no process could be started, or a session died before a candidate's code
                      ran in it, or the pool was closed. An episode that ends so is masked.
  CandidateLost       The sandbox went away after a candidate's code ran in it. ``Sandbox`` turns it
                      into an ordinary failure (exit code 137, a call that was killed, no files), so
                      episodes and graders need not handle it. Penalties are kept, nothing is
                      masked.
  SnapshotError       The workspace holds what cannot be handed in. The agent is told and can mend
                      it.
  ValueError,         A request that this workspace cannot fulfil: a path that leads out, files that
  OSError             do not fit. The agent is told, and the episode goes on.
"""

from __future__ import annotations


class SandboxUnavailable(RuntimeError):
    """Code cannot be isolated on this machine; the message says how to change that."""


class SandboxFault(RuntimeError):
    """The host could not run a sandbox, and no code of a candidate can have caused it."""


class CandidateLost(RuntimeError):
    """The sandbox is gone after code of the candidate ran in it: the candidate's own failure."""


class SnapshotError(ValueError):
    """The files of the workspace cannot be handed in; the message tells the agent why."""
