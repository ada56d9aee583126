"""Files that a Dockerfile copies, for worlds that are made without its image.

Read are the last stage's FROM, COPY and ADD (shell words, JSON arrays and heredocs; several
sources, folders and patterns; --chown, which changes nothing here, and --chmod), WORKDIR, ENV and
ARG with their variables, and .dockerignore. Everything that needs an image, another stage or the
network is refused by its line.
"""

from __future__ import annotations

import dataclasses
import json
import os
import posixpath
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rl_code.environment.sandbox.snapshot import File
from rl_code.tasks.source import NoTask, read_text

# Instructions that change no file.
_NOTHING = {"CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "USER", "MAINTAINER", "STOPSIGNAL", "VOLUME"}
_NOTHING |= {"SHELL", "HEALTHCHECK"}
# Options of COPY and ADD that change nothing here: files belong to the agent.
_IDLE = {"chown", "link"}
_HEREDOC = re.compile(r"<<(-?)([\"']?)(\w+)\2")
_VARIABLE = re.compile(r"\\(.)|\$(?:(\w+)|\{(\w+)(?:(:[-+])([^}]*))?\})")
_UNPACKED = re.compile(r".*\.(tar|tar\.\w+|tgz|tbz2?|txz)")
_REMOTE = re.compile(r"\w+://|git@")
# Files and bytes that a folder may hold.
_MOST_FILES = 8000
_MOST_BYTES = 64 << 20


@dataclasses.dataclass
class Copied:
    """Result of a stage."""

    # Absolute path -> file or link.
    files: dict[str, File] = dataclasses.field(default_factory=dict)
    # Folder that commands start in.
    workdir: str = "/"
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    # Folders that there are.
    folders: set[str] = dataclasses.field(default_factory=lambda: {"/"})


def copied(folder: Path, variables: Mapping[str, str]) -> Copied:
    """Files that the Dockerfile in a folder copies. Raises NoTask, which names the line.

    variables: those that there are before it sets any.
    """
    context = context_of(folder)
    stages: dict[str, Copied] = {}
    arguments: dict[str, str] = dict(variables)
    stage = Copied()
    for number, name, rest, heredocs in _instructions(read_text(folder / "Dockerfile")):
        line = _Line(number, name, rest, heredocs, {**arguments, **stage.environment})
        if name == "FROM":
            words = line.expanded(rest).split()
            words = [word for word in words if not word.startswith("--")]
            known = stages.get(words[0].lower()) if words else None
            stage = Copied() if known is None else _copy_of(known)
            if len(words) == 3:
                stages[words[2].lower()] = stage
        elif name == "WORKDIR":
            stage.workdir = posixpath.normpath(posixpath.join(stage.workdir, line.expanded(rest)))
            _note_folder(stage, stage.workdir)
        elif name in ("COPY", "ADD"):
            line.copy(stage, context)
        elif name == "ENV":
            stage.environment |= line.settings()
        elif name == "ARG":
            arguments |= line.settings() if "=" in rest else {}
        elif name not in _NOTHING:
            raise line.refused(f"{name} needs an image: name a folder with one as places.images")
    return stage


def context_of(folder: Path) -> dict[str, File]:
    """Files and links of a folder by path, without what .dockerignore leaves out. Raises NoTask."""
    ignored = _ignored(folder / ".dockerignore")
    found: dict[str, File] = {}
    size = 0
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name in ("Dockerfile", ".dockerignore") or ignored(name):
            continue
        if path.is_symlink():
            found[name] = File(os.readlink(os.fsencode(path)), 0o777, "link")
        elif path.is_file():
            size += path.stat().st_size
            if len(found) == _MOST_FILES or size > _MOST_BYTES:
                raise NoTask(
                    f"{folder.name}/ has more than {_MOST_FILES} files or {_MOST_BYTES} bytes"
                )
            mode = 0o755 if os.access(path, os.X_OK) else 0o644
            found[name] = File(path.read_bytes(), mode)
        elif path.is_dir() and not any(path.iterdir()):
            found[name] = File(b"", 0o755, "folder")
    return found


def _ignored(path: Path) -> Callable[[str], bool]:
    """A function that tells paths that the patterns of a file leave out; the last that matches a
    path or a folder above it decides.
    """
    patterns = []
    for line in read_text(path).splitlines() if path.is_file() else ():
        line = line.strip()
        if line and not line.startswith("#"):
            keeps = line.startswith("!")
            pattern = posixpath.normpath(line.removeprefix("!").strip()).lstrip("/")
            patterns.append((re.compile(_pattern(pattern)), keeps))

    def ignored(name: str) -> bool:
        parts = name.split("/")
        above = ["/".join(parts[: end + 1]) for end in range(len(parts))]
        left_out = False
        for pattern, keeps in patterns:
            if any(pattern.fullmatch(one) for one in above):
                left_out = not keeps
        return left_out

    return ignored


def _pattern(pattern: str) -> str:
    """The regular expression of a pattern: "*" and "?" stay in a folder, "**" does not."""
    out = []
    for part in re.split(r"(\*\*/?|\[[^]]*\]|[*?])", pattern):
        if part.startswith("**"):
            out.append("(?:.*/)?" if part.endswith("/") else ".*")
        elif part in ("*", "?"):
            out.append("[^/]*" if part == "*" else "[^/]")
        elif part.startswith("["):
            out.append(part.replace("\\", "\\\\"))
        else:
            out.append(re.escape(part))
    return "".join(out)


# True for one in which no variable is replaced, and its text.
type Heredoc = tuple[bool, str]


def _instructions(text: str) -> Iterator[tuple[int, str, str, dict[str, Heredoc]]]:
    """(line number, name, the rest, heredoc's mark -> its text) of each instruction."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        number = at + 1
        joined = ""
        while at < len(lines):
            line = lines[at].rstrip()
            at += 1
            if not line.strip() or line.lstrip().startswith("#"):
                if not joined:
                    break
                continue  # comments and empty lines inside of an instruction are left out
            if not line.endswith("\\"):
                joined += line
                break
            joined += f"{line[:-1]} "
        name, _, rest = joined.strip().partition(" ")
        if not name:
            continue
        heredocs: dict[str, Heredoc] = {}
        name = name.upper()
        for tabs, quote, mark in _HEREDOC.findall(rest) if name in ("COPY", "ADD", "RUN") else ():
            body = []
            while at < len(lines) and (lines[at].lstrip("\t") if tabs else lines[at]) != mark:
                body.append(lines[at].lstrip("\t") if tabs else lines[at])
                at += 1
            if at == len(lines):
                raise NoTask(f"environment/Dockerfile, line {number}: <<{mark} has no end")
            at += 1
            heredocs[mark] = bool(quote), "".join(f"{line}\n" for line in body)
        yield number, name, rest.strip(), heredocs


@dataclasses.dataclass(frozen=True)
class _Line:
    """One instruction. heredocs: by mark. variables: what $NAME stands for."""

    number: int
    name: str
    rest: str
    heredocs: Mapping[str, Heredoc]
    variables: Mapping[str, str]

    def refused(self, why: str) -> NoTask:
        """Error that names the line."""
        return NoTask(f"environment/Dockerfile, line {self.number}: {why}")

    def expanded(self, text: str) -> str:
        """The text with its variables replaced."""

        def value(match: re.Match) -> str:
            escaped, plain, braced, how, other = match.groups()
            if escaped is not None:
                return escaped if escaped == "$" else match.group()
            found = self.variables.get(plain or braced, "")
            if how == ":+":
                return other if found else ""
            return found or other or ""

        return _VARIABLE.sub(value, text)

    def words(self, text: str) -> list[str]:
        """Words of the shell. Raises NoTask."""
        try:
            return shlex.split(text)
        except ValueError as error:  # a quotation that does not end
            raise self.refused(f"{self.name} {self.rest}: {error}") from error

    def settings(self) -> dict[str, str]:
        """Variables that ENV or ARG set."""
        words = self.words(self.rest)
        if words and "=" not in words[0]:  # ENV name some value
            name, _, value = self.rest.partition(" ")
            return {name: self.expanded(value.strip())}
        pairs = (word.partition("=") for word in words)
        return {name: self.expanded(value) for name, _, value in pairs}

    def copy(self, stage: Copied, context: Mapping[str, File]) -> None:
        """Puts what COPY or ADD copies into a stage. Raises NoTask."""
        sources, target, mode = self._parts()
        target = self.expanded(target)
        into = posixpath.normpath(posixpath.join(stage.workdir, target))
        into = f"/{into.lstrip('/')}"
        is_folder = target.endswith("/") or target == "." or len(sources) > 1
        is_folder = is_folder or into in stage.folders
        for source in sources:
            found = self._found(source, context)
            for inner, entry in found.items():
                place = posixpath.join(into, inner) if inner else into
                if inner.startswith("\0"):  # a file by its own name
                    place = posixpath.join(into, inner[1:]) if is_folder else into
                if mode is not None and entry.kind == "file":
                    entry = dataclasses.replace(entry, mode=mode)
                if place in stage.folders and entry.kind != "folder":
                    raise self.refused(f"{place} is a folder already")
                _note_folder(stage, posixpath.dirname(place))
                stage.files[place] = entry

    def _parts(self) -> tuple[list[str], str, int | None]:
        """Sources, target and rights of COPY or ADD. Raises NoTask."""
        rest, mode = self.rest, None
        while match := re.match(r"--([\w-]+)(?:=(\S*))?\s+", rest):
            option, value = match.groups()
            rest = rest[match.end() :]
            if option == "chmod" and re.fullmatch(r"0?[0-7]{3}", value or ""):
                mode = int(value, 8) | 0o600
            elif option not in _IDLE:
                said = f"--{option}={value}" if value else f"--{option}"
                why = (
                    "needs an image of another stage" if option == "from" else "cannot be followed"
                )
                raise self.refused(
                    f"{self.name} with {said} {why}: name a folder with an image as places.images"
                )
        try:
            words = json.loads(rest) if rest.startswith("[") else self.words(rest)
        except ValueError:  # no JSON: words, one of which begins so
            words = self.words(rest)
        if len(words) < 2 or not all(isinstance(word, str) for word in words):
            raise self.refused(f"{self.name} {self.rest} must name what is copied and where to")
        return words[:-1], words[-1], mode

    def _found(self, source: str, context: Mapping[str, File]) -> dict[str, File]:
        """Files of a source: by path below it, those of a file by its name behind a NUL."""
        if source.startswith("<<"):
            mark = source.lstrip("<-")
            quoted, text = self.heredocs[mark]
            return {f"\0{mark}": File((text if quoted else self.expanded(text)).encode())}
        if self.name == "ADD" and (_REMOTE.match(source) or _UNPACKED.fullmatch(source)):
            raise self.refused(f"ADD {source} is fetched or unpacked, which needs an image")
        path = posixpath.normpath(self.expanded(source)).lstrip("/")
        if path.startswith("../"):
            raise self.refused(f"{source} is outside of environment/")
        found: dict[str, File] = {}
        pattern = re.compile(_pattern(path))
        for name, entry in context.items():
            if path == ".":
                found[name] = entry
            elif pattern.fullmatch(name):
                found[f"\0{posixpath.basename(name)}"] = entry
            else:
                parts = name.split("/")
                tops = ("/".join(parts[:end]) for end in range(1, len(parts)))
                if (top := next((one for one in tops if pattern.fullmatch(one)), "")) != "":
                    found[name[len(top) + 1 :]] = entry
        if not found and path != ".":
            raise self.refused(f"there is no {source}")
        return found


def _note_folder(stage: Copied, path: str) -> None:
    """Notes a folder and those above it."""
    while path not in stage.folders:
        stage.folders.add(path)
        path = posixpath.dirname(path)


def _copy_of(stage: Copied) -> Copied:
    """Another stage that begins as one."""
    return Copied(dict(stage.files), stage.workdir, dict(stage.environment), set(stage.folders))
