"""A runtime of verifiers whose commands run in the sandbox of the episode: the endpoint's
``/execute`` runs them there. It is imported by a Python that has verifiers.

It stands for the package's ``subprocess``, which runs commands on this machine. Programs that go on
by themselves, and those that uv would load from a registry, are beyond it.
"""

import asyncio
import base64
import json
import shlex
import urllib.request

from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import ProgramResult, SubprocessRuntime

# Bytes that are written by one command, and read by one: what a sandbox shows of an output is
# little (``sandbox.output_bytes``), and base64 makes it longer.
_WRITTEN = 60_000
_READ = 2_400
# The most bytes of an output that are kept.
_MOST_OUTPUT = 1 << 16
# Seconds within which the endpoint answers, beyond any limit of an episode.
_LONGEST_S = 3600.0
_TIMED_OUT = 124


class EpisodeSandbox(SubprocessRuntime):
    """The sandbox of one episode.

    url: base URL of the episode's API.
    """

    def __init__(self, url, config, name=None):
        super().__init__(config, name)
        self._url = url

    async def start(self):
        """The sandbox is opened with its first command."""
        self.info.id = self.name

    async def run(self, argv, env):
        """As ``Runtime.run``; an output that is too long is cut at its end."""
        settings = [f"{name}={value}" for name, value in self.process_env(env).items()]
        line = shlex.join(["env", *settings, *argv])
        code, said = await self._execute(
            f'd=$(mktemp -d)\n{line} > "$d/out" 2> "$d/errors" < /dev/null\n'
            'code=$?; echo "$d"; exit $code'
        )
        if code == _TIMED_OUT and not said:
            return ProgramResult(code, "", "stopped at limits.command_s")
        folder = said.strip()
        try:
            parts = [await self._read(f"{folder}/{n}", _MOST_OUTPUT) for n in ("out", "errors")]
        except SandboxError:  # the command has removed them
            parts = [b"", b""]
        await self._execute(f"rm -rf {shlex.quote(folder)}")
        out, errors = (part.decode(errors="replace") for part in parts)
        return ProgramResult(code, out, errors)

    async def open_process(self, argv, env):
        """Raises SandboxError."""
        raise SandboxError("the episode's sandbox has no programs that are spoken to")

    async def run_background(self, argv, env, log):
        """Raises SandboxError."""
        raise SandboxError("the episode's sandbox has no programs that go on by themselves")

    async def prepare_uv_script(self, script, env=None, *, activate=True):
        """Raises SandboxError."""
        raise SandboxError(
            "a program that uv prepares needs a registry, which the episode's sandbox has not; "
            "tasks.sandboxed=False runs it on this machine, with your rights"
        )

    async def _read(self, path, max_bytes=None):
        data = b""
        while max_bytes is None or len(data) < max_bytes:
            count = _READ if max_bytes is None else min(_READ, max_bytes - len(data))
            code, said = await self._execute(
                f"test -f {shlex.quote(path)} || exit 9\n"
                f"tail -c +{len(data) + 1} {shlex.quote(path)} | head -c {count} | base64 -w0"
            )
            if code:
                raise SandboxError(f"read {path!r}: it cannot be read (code {code})")
            part = decoded(said)
            data += part
            if len(part) < count:
                break
        return data

    async def write(self, path, data):
        """As ``Runtime.write``."""
        place = shlex.quote(path)
        code, _ = await self._execute(f'mkdir -p "$(dirname {place})" && : > {place}')
        for start in range(0, len(data), _WRITTEN):
            if code:
                break
            text = base64.b64encode(data[start : start + _WRITTEN]).decode()
            code, _ = await self._execute(f"echo {text} | base64 -d >> {place}")
        if code:
            raise SandboxError(f"write {path!r}: it cannot be written (code {code})")

    async def teardown(self):
        """The sandbox ends with its episode."""

    def cleanup(self):
        """The same."""

    async def _execute(self, command):
        """Exit code and output of a command of bash in the workspace. Raises SandboxError."""
        return await asyncio.to_thread(self._post, command)

    def _post(self, command):
        request = urllib.request.Request(
            f"{self._url}/execute",
            json.dumps({"command": command}).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_LONGEST_S) as answer:
                done = json.loads(answer.read())
        except OSError as error:
            raise SandboxError(f"the episode's sandbox: {error}") from error
        return (_TIMED_OUT, "") if done["timed_out"] else (done["returncode"], done["output"])


def decoded(text):
    """Bytes of base64, which a command of the model's may have garbled. Raises SandboxError."""
    try:
        return base64.b64decode(text.strip(), validate=True)
    except ValueError as error:
        raise SandboxError(f"an output cannot be read: {error}") from error
