"""A learner in a process of its own, for tests: it obeys lines on its standard input and answers
each with one.

    python -m tests.rl_code.weights.learner WORKDIR [PORT PROCESS PROCESSES]

publish V, serve V: publishes version V to storage, or to be pulled too; with the numbers of another
version if a second one is given. fetch V stored, fetch V live: reads it back, and answers whether
anything came in full, as changes, live. cut 1: storage cannot be read any more. With a port it is
one of several processes under jax.distributed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests import programs

MARK = "answer: "
LONG_S = 300.0  # for what comes soon unless the machine is busy


class Learner:
    """The other end: starts a learner and sends it lines."""

    def __init__(self, workdir: Path, *arguments: int):
        module = "tests.rl_code.weights.learner"
        # XLA on CPU has a thread for each device. If all of them wait in a collective for a process
        # that pulls weights from this one, nobody sends them, and both wait for ever. Only here are
        # those who pull and those who serve the same processes. NPROC gives XLA more threads.
        environment = os.environ | {"NPROC": "16"}
        self.process = programs.start(
            module, workdir, *arguments, stdin=subprocess.PIPE, stderr=None, env=environment
        )

    def send(self, line: str) -> None:
        """Without waiting for the answer."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        """The next answer; empty when the process has ended."""
        # Gloo prints lines of its own
        while (line := self.process.stdout.readline()) and not line.startswith(MARK):
            pass
        return line.removeprefix(MARK).strip()

    def ask(self, line: str) -> str:
        """Sends a line and returns the answer."""
        self.send(line)
        return self.answer()

    def stop(self) -> None:
        """Stops it until it gets SIGCONT; no thread of it runs any more when this returns."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def kill(self) -> None:
        """Ends it at once, as by the out-of-memory killer."""
        self.process.kill()
        self.process.wait(30)
        self.process.stdin.close()
        self.process.stdout.close()


def main(workdir: str, port: str = "", process: str = "0", processes: str = "1") -> None:
    """Obeys until the input ends."""
    import jax

    if port:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(process))

    from rl_code.weights import codec
    from rl_code.weights.stored_publisher import StoredPublisher
    from rl_code.weights.stored_subscriber import StoredSubscriber
    from rl_code.weights.transfer_publisher import TransferPublisher
    from rl_code.weights.transfer_subscriber import TransferSubscriber
    from rl_code.weights.versions import WeightError
    from tests.rl_code.weights.small import DTYPE, KEPT, assert_is, mesh, model_of, wanted

    where = mesh(1, len(jax.devices()))
    jax.set_mesh(where)
    actor = mesh(2, len(jax.devices()) // 2)
    stored = StoredPublisher(workdir, DTYPE, KEPT)
    live = TransferPublisher(stored, host="127.0.0.1")
    reader = StoredSubscriber(workdir, wanted(actor), name="actor-0")
    puller = TransferSubscriber(
        StoredSubscriber(workdir, wanted(actor), name="actor-1"), host="127.0.0.1", pull_s=LONG_S
    )
    _say("ready")
    for line in sys.stdin:
        verb, *words = line.split()
        try:
            if verb == "serve":
                live.publish(int(words[0]), model_of(int(words[-1]), where))
                _say("served")
            elif verb == "publish":
                stored.publish(int(words[0]), model_of(int(words[-1]), where))
                _say("published")
            elif verb == "cut":
                if words[0] == "1":
                    codec.read = _unplugged
                _say("cut")
            elif verb == "fetch":
                subscriber = {"stored": reader, "live": puller}[words[1]]
                number, model = subscriber.wait(exactly=int(words[0]), deadline_s=LONG_S)
                assert_is(model, number, actor)
                stats = subscriber.fetched
                _say(f"{stats.full_bytes > 0} {stats.delta_bytes > 0} {stats.live_bytes > 0}")
        except WeightError as error:
            _say(f"{type(error).__name__}: {error}")


def _unplugged(*_):
    raise OSError("unplugged")


def _say(answer: str) -> None:
    print(f"{MARK}{answer}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
