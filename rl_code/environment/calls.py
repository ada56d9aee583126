"""Carries out what an episode asks for in its workspace: the calls of its messages, or the commands
of an agent of others.

If the sandbox is lost meanwhile, another one is built and brought to where the lost one was.
Whether the machine or the agent's code lost it cannot be known. So the machine's accidents cost no
reward. Code that brings its sandbox down does so again, and what it gets is that of the last try: a
failure.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping

from absl import logging

from rl_code.environment.finished import Grade
from rl_code.environment.frames import Frame, Frames
from rl_code.environment.sandbox.pool import SandboxFault
from rl_code.environment.sandbox.snapshot import Snapshot
from rl_code.environment.tools.api import PROVOKED, execute
from rl_code.environment.tools.tool import Tool
from rl_code.environment.tools.workspace import Workspace
from rl_code.types import Limits, ToolResult

# How often the calls of one message, or a command, are carried out, where the sandbox is lost each
# time.
TRIES = 3


@dataclasses.dataclass(frozen=True)
class FirstEdit:
    """The files after the first edit, and what is known of them."""

    files: Snapshot
    # True if nothing was changed after it.
    stands: bool = True
    # True if a visible test is known to fail on it.
    failed: bool = False


class Calls:
    """The workspace of an episode, and what calls have done there.

    name: of the episode, for messages. tools: all that its calls may name. new_workspace: makes a
    workspace as it is at the start.
    """

    def __init__(
        self,
        name: str,
        tools: Mapping[str, Tool],
        limits: Limits,
        new_workspace: Callable[[], Workspace],
    ):
        self._name = name
        self._tools = tools
        self._limits = limits
        self._new_workspace = new_workspace
        self.workspace = new_workspace()
        # None before an edit.
        self.first_edit: FirstEdit | None = None
        # True if a call since the last ``take_changed`` may have changed files.
        self._changed = False
        # Number of times that a lost sandbox was built again.
        self.rebuilt = 0
        # Wall-clock seconds that calls took, those in which a sandbox was lost left out.
        self.seconds = 0.0
        # Wall-clock seconds of tries in which a sandbox was lost, and of building others.
        self.lost_s = 0.0
        # True if the workspace has all that was done; False where no time was left to do it again.
        self.whole = True
        # Actions carried out so far, in order. They bring another workspace to the same state.
        self._done: list[Callable[[Workspace], object]] = []

    def fork(self, name: str) -> Calls:
        """Others that have come the same way, for an episode of another name. Raises as
        ``Workspace.fork``.
        """
        other = copy.copy(self)
        other._name = name
        other.workspace = self.workspace.fork()
        other._done = list(self._done)
        return other

    def carry_out(self, frames: Frames) -> list[int] | None:
        """Carries out the calls of the context at work that are still to come. Their results are in
        ``Frame.results``, in order.

        Returns None, or the prompt of a sub-agent where a call asks one. The calls behind it are
        carried out when it has answered. Raises SandboxFault.
        """
        frame = frames.at_work
        pending = tuple(frame.pending)
        results, contexts = len(frame.results), len(frames.all)

        def undo() -> None:
            frame.pending = collections.deque(pending)
            del frame.results[results:]
            frames.go_back(frame, contexts)

        # Tools get what is left of the episode's time. The time in which the sampler writes a
        # message is not counted, and of several tries the last one is.
        start = time.monotonic()
        lost_s = self.lost_s
        self.workspace.deadline = start + self._limits.tools_s - self.seconds
        asked = self.attempt(lambda: self._execute(frame, frames), undo)
        self.seconds += time.monotonic() - start - (self.lost_s - lost_s)
        return asked

    def attempt[T](self, act: Callable[[], T], undo: Callable[[], None] = lambda: None) -> T:
        """Calls ``act``, which uses the workspace, and returns its result. If the sandbox is lost
        meanwhile, it is built again, and ``act`` is called again, a few times at most.

        undo: takes back what a lost try has left elsewhere. Raises SandboxFault, and what ``act``
        raises.
        """
        first_edit = self.first_edit
        done = len(self._done)
        fault: SandboxFault | None = None
        # In a sandbox that was brought down in every try before, all that follows fails.
        for tries_left in reversed(range(1 if self.workspace.lost else TRIES)):
            start = time.monotonic()
            try:
                if fault is not None:
                    raise fault
                result = act()
                if not self.workspace.lost or not tries_left:
                    return result
            except SandboxFault:
                if not tries_left:
                    raise
            logging.warning("%s lost its sandbox: it is built again", self._name)
            self.rebuilt += 1
            self.first_edit = first_edit
            del self._done[done:]
            undo()
            fault = self._rebuild(start)
        raise AssertionError("unreachable")

    def do[T](self, action: Callable[[Workspace], T]) -> T:
        """Carries out an action in the workspace and returns its result. The action is done again
        in every workspace that is built in place of this one.
        """
        self._done.append(action)
        return action(self.workspace)

    def take_changed(self) -> bool:
        """True if calls since the last time that this was asked may have changed files."""
        changed, self._changed = self._changed, False
        return changed

    @property
    def no_edit_passed(self) -> bool | None:
        """Value to record if no edit succeeded: False, or None where the agent has no tool that
        edits.
        """
        return False if any(tool.edits for tool in self._tools.values()) else None

    def files_after(self) -> Snapshot:
        """The files as they were handed in, or as they stand. Raises SandboxFault."""
        if self.workspace.handed_in is not None:
            return self.workspace.handed_in
        try:
            return self.workspace.snapshot()
        except PROVOKED as error:  # not handed in, so nothing is graded
            logging.info("%s left files that cannot be read in full: %s", self._name, error)
            return {}

    def first_edit_passed(
        self, final: Snapshot, verdict: Grade, grade: Callable[[Snapshot], Grade]
    ) -> bool | None:
        """True if the first edit alone passes every test; None where no tool edits. Raises
        SandboxFault.

        final: the files at the end. verdict: what the tests made of them. grade: says that of
        others.
        """
        first = self.first_edit
        if first is None or first.failed:
            return self.no_edit_passed
        if verdict.submitted and first.files == final:
            return verdict.solved  # the same files were graded already
        return grade(first.files).solved

    def _rebuild(self, start: float) -> SandboxFault | None:
        """Another workspace in place of a lost one, in which all that was done before is done
        again. The fault that kept it from that, if there was one. What is done again may lose this
        sandbox as well, or use up the time.

        start: when the lost try began.
        """
        deadline = self.workspace.deadline
        self.workspace.close()
        workspace = self._new_workspace()
        # The time of the loss is added to the episode's time, since an accident late in an episode
        # must not end it. All losses together add no more than the episode itself may last: no
        # sandbox that is lost over and over may hold up a run.
        spare_s = max(0.0, self._limits.tools_s - self.lost_s)
        workspace.deadline = deadline + spare_s
        self.workspace = workspace
        fault = None
        try:
            self.whole = all(self._do_again(action) for action in self._done)
        except SandboxFault as found:
            fault = found
        lost_s = time.monotonic() - start
        self.lost_s += lost_s
        workspace.deadline = deadline + min(lost_s, spare_s)
        return fault

    def _do_again(self, action: Callable[[Workspace], object]) -> bool:
        """Carries out an action if there is time left for it, and returns True if there was."""
        if self.workspace.out_of_time:
            return False
        action(self.workspace)
        return True

    def _execute(self, frame: Frame, frames: Frames) -> list[int] | None:
        """As ``carry_out``, in the workspace as it is. Calls after a submit are not carried out.
        One result stands for all calls beyond the limit.
        """
        while frame.pending:
            call = frame.pending.popleft()
            if call.error:
                frame.results.append(ToolResult(call.name, call.error, ok=False, id=call.id))
                continue
            if self.workspace.out_of_time:
                told = "the time is used up"
                frame.results.append(ToolResult(call.name, told, ok=False, id=call.id))
                continue
            tool = frame.tools[call.name]
            if tool.delegation is not None:
                if (prompt := frames.delegate(frame, call, tool.delegation)) is not None:
                    return prompt
                continue
            self.workspace.tests_failed = None
            result = self.do(functools.partial(execute, call, frame.tools))
            frame.results.append(result)
            self._changed |= tool.edits or tool.runs_commands
            self._note_edit(tool, ok=result.ok)
            if self.workspace.handed_in is not None:
                return None
        if frame.beyond:
            most = self._limits.calls
            told = (
                f"only the first {most} calls of a message are carried out, not "
                f"{most + frame.beyond}"
            )
            frame.results.append(ToolResult("", told, ok=False))
        return None

    def _note_edit(self, tool: Tool, *, ok: bool) -> None:
        """Keeps the files after the first edit, and what is known about them since."""
        first = self.first_edit
        if first is None:
            if tool.edits and ok:
                try:
                    # an edit may have run the tests itself
                    failed = bool(self.workspace.tests_failed)
                    self.first_edit = FirstEdit(self.workspace.snapshot(), failed=failed)
                except PROVOKED:  # files that cannot be read in full are not graded
                    self.first_edit = FirstEdit({}, failed=True)
        elif tool.edits or tool.runs_commands:
            self.first_edit = dataclasses.replace(first, stands=False)
        # A visible test that fails while nothing was changed since the first edit shows that this
        # edit fails, so it need not be graded on its own.
        elif self.workspace.tests_failed is not None and first.stands:
            self.first_edit = dataclasses.replace(first, failed=self.workspace.tests_failed)
