"""Sandboxes with a network of their own: a loopback, and no other way out."""

from __future__ import annotations

import dataclasses

import pytest

from rl_code.environment.sandbox.inside import seccomp
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool

CONFIG = SandboxConfig(workers=1, loopback=True)
LISTENS = """
import socket, sys
server = socket.create_server(("127.0.0.1", 5000))
client = socket.create_connection(("127.0.0.1", 5000))
taken, _ = server.accept()
taken.sendall(b"heard")
print(client.recv(9).decode(), flush=True)
if len(sys.argv) > 1:
    sys.stdin.read()
"""
FAMILIES = """
import socket
for family in ("AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG"):
    kind = socket.SOCK_RAW if family in ("AF_NETLINK", "AF_PACKET") else socket.SOCK_STREAM
    try:
        socket.socket(getattr(socket, family), kind)
    except PermissionError:
        print(family)
"""


@pytest.fixture(scope="module")
def pool():
    with SandboxPool(CONFIG) as made:
        yield made


def said(sandbox, code, *arguments):
    done = sandbox.run(["python3", "-c", code, *arguments], timeout_s=20.0)
    assert done.exit_code == 0, done.stdout
    return done.stdout.split()


def test_each_sandbox_has_its_own_loopback(pool):
    first, second = pool.open({}), pool.open({})
    listening = first.start(["python3", "-c", LISTENS, "stay"], channel=3, timeout_s=60.0)
    try:
        # the port is free in the other one, of the same worker
        assert said(second, LISTENS) == ["heard"]
    finally:
        listening.close()
        first.close()
        second.close()


def test_only_the_families_of_the_internet_and_of_files_have_sockets(pool):
    sandbox = pool.open({})
    assert said(sandbox, FAMILIES) == ["AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG"]
    sandbox.close()


def test_sandboxes_have_no_sockets_unless_they_are_asked_for():
    for machine in seccomp.MACHINES:
        without = seccomp.program(machine)
        assert without != seccomp.program(machine, sockets=True)
        numbers = {seccomp.number(name, machine) for name in seccomp.SOCKETS}
        lines = [without[at : at + 8] for at in range(0, len(without), 8)]
        assert not numbers & {
            int.from_bytes(line[4:], "little") for line in lines[4:] if line[0] == 0x15
        }
    with SandboxPool(dataclasses.replace(CONFIG, loopback=False)) as pool:
        sandbox = pool.open({})
        families = said(sandbox, FAMILIES)
        sandbox.close()
    assert families[:3] == ["AF_UNIX", "AF_INET", "AF_INET6"]


def test_address_space_may_exceed_memory():
    code = "import mmap; mmap.mmap(-1, 1 << 30)"
    config = SandboxConfig(workers=1, memory_mb=256)
    for address_mb, code_of_exit in ((0, 1), (4096, 0)):
        with SandboxPool(dataclasses.replace(config, address_mb=address_mb)) as pool:
            sandbox = pool.open({})
            done = sandbox.run(["python3", "-c", code], timeout_s=20.0)
            sandbox.close()
        assert done.exit_code == code_of_exit, done.stdout
