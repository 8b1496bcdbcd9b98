"""Published ports and `belljar ssh`: services and shells of a guest without a network, from this host."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from tests.batch.lab.page import follow
from tests.live.conftest import LONGEST, ROOT, Belljar
from tests.live.terminal import terminal
from tests.live.test_detached import detached, keeper_of, until_it_said
from tests.unit.guest.test_connecting import free_port

SERVES = """
import http.server, sys
class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Quiet)
print("up", flush=True)
server.serve_forever()
"""
SERVICE = ("--cwd", "/etc", "--", "python3", "-c", SERVES)


def fetched(place: str, path: str = "hostname") -> bytes:
    with urllib.request.urlopen(f"http://{place}/{path}", timeout=LONGEST) as answer:
        return bytes(answer.read())


def test_a_service_of_a_machine_without_a_network_is_reached(belljar: Belljar) -> None:
    done = belljar.run("--detach", "--publish", "0:8000", *SERVICE)
    assert done.returncode == 0 and done.stderr.endswith(b" is port 8000 of the machine\n"), done.stderr
    id, place = done.stdout.decode().strip(), done.stderr.decode().split()[1]
    until_it_said(belljar, id)
    assert fetched(place) == f"belljar-{id}\n".encode()
    shown = belljar.json("show", id)
    assert [f"{port['address']}:{port['host']}" for port in shown["ports"]] == [place]
    assert f"{place} to 8000" in belljar("show", id).stdout.decode()

    added = belljar("port", id, "8000").stdout.decode().strip()
    assert added != place and fetched(added) == fetched(place)
    assert [port["guest"] for port in belljar.json("port", id)] == [8000, 8000]
    taken = belljar("port", id, f"{place.rpartition(':')[2]}:8000")
    assert taken.returncode == 125 and b"Address already in use" in taken.stderr
    bad = belljar("port", id, "http")
    assert bad.returncode == 125 and b"not of the form" in bad.stderr

    second = belljar.run("--publish", f"{place.rpartition(':')[2]}:8000", *SERVICE)
    assert second.returncode == 125 and second.stderr.count(b"\n") == 2 and b"Address already in use" in second.stderr

    os.kill(keeper_of(belljar, id), signal.SIGKILL)
    belljar("wait", id)
    for listener in (place, added):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(listener.rpartition(":")[2])), LONGEST)
    belljar("reap")
    again = belljar.run("--publish", f"{place.rpartition(':')[2]}:8000", "--", "true")
    assert again.returncode == 0, again.stderr
    late = belljar("port", id, "8000")
    assert late.returncode == 125 and b"has ended" in late.stderr and belljar.leftovers() == []


def test_a_program_publishes_and_large_answers_arrive_whole(belljar: Belljar) -> None:
    code = """
import hashlib, json, time, urllib.request, belljar.api as belljar
machine = belljar.start(json.loads(input()), cwd="/", tied=True, ports=["0:8000"])
port = machine.forward(8000)
assert port in machine.ports and len(machine.ports) == 2
machine.exec(["sh", "-c", "head -c 30000000 /dev/urandom > /dev/shm/large"])
digest = machine.exec(["sha256sum", "/dev/shm/large"])[1].split()[0].decode()
while machine.stdout != b"up\\n":
    time.sleep(0.1)
with urllib.request.urlopen(f"http://{port.address}:{port.host}/dev/shm/large", timeout=120) as answer:
    assert hashlib.sha256(answer.read()).hexdigest() == digest
machine.stop()
"""
    words = json.dumps(["python3", "-c", SERVES]).encode()
    path = {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**belljar.env, **path}, input=words, timeout=LONGEST, check=False
    )
    assert done.returncode == 0 and belljar.leftovers() == []


def test_the_page_about_notebooks_is_as_it_says(belljar: Belljar, tmp_path: Path) -> None:
    command = tmp_path / "bin" / "belljar"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m belljar "$@"\n')
    command.chmod(0o755)
    port = free_port()

    def run(commands: str, as_user: bool) -> str:
        done = subprocess.run(
            ["sh", "-euc", commands.replace("8888", str(port))], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True,
            env={**belljar.env, "PATH": f"{command.parent}:{belljar.env['PATH']}"}, text=True, timeout=LONGEST,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"$ {commands}{done.stdout}{done.stderr}exit {done.returncode}"
        return done.stdout

    assert len(follow(ROOT / "docs/jobs/notebook.md", run)) == 3
    assert belljar("wait", "lab").returncode == 128 + signal.SIGTERM and belljar.leftovers() == []


def test_a_shell_in_a_machine_is_as_its_user_is_used_to(belljar: Belljar, tmp_path: Path) -> None:
    id = detached(belljar, "--cwd", "/usr", "--", "sh", "-c", "echo up; exec sleep 1000")
    until_it_said(belljar, id)
    done = belljar("ssh", id, "echo $((6 * 7))", "$(pwd)", '"$LANG"; exit 3', env={"LANG": "de_DE.UTF-8"})
    assert (done.returncode, done.stdout) == (3, b"42 /usr de_DE.UTF-8\n"), done.stderr
    assert belljar("ssh", id, "cat >/dev/shm/in", input=b"words").returncode == 0
    assert belljar("ssh", "--user", "0", id, "--", "cat", "/dev/shm/in").stdout == b"words"
    with terminal() as person:
        person.start(belljar.argv("ssh", id), {**belljar.env, "TERM": "screen-256color"})
        person.type(b"shopt -q login_shell; echo login $? term $TERM size $(stty size)\r")
        person.expect(rb"login 0 term screen-256color size 31 117")
        person.type(b"exit 4\r")
        person.rest()
        assert person.process is not None and person.process.returncode == 4
    assert belljar("kill", id).returncode == 0 and belljar.leftovers() == []
