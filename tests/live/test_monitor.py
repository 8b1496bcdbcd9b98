"""A machine on the page and on the terminal, from its first state to its end; in a browser, too, where hostile output stays text."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.live.conftest import Belljar

from belljar.host.locks import try_lock

HOSTILE = "<script>document.title='guest'</script><img src=x onerror=document.title='guest'>"
VIRTUAL = 10_000  # milliseconds of the page's own clock, which waits for what the page fetches
IN_BROWSER = pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium")
KEPT: list[object] = []  # locks of machines that seem to live
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="root alone sees the machines of others")


class Page:
    """`belljar monitor serve`, and a reader of its events with the token."""

    def __init__(self, belljar: Belljar, folder: Path, *words: str) -> None:
        self.file = folder / "token"
        self.file.write_text("a token for this test alone\n")
        self.file.chmod(0o600)
        self.serve = belljar.popen(
            *words, "monitor", "serve", "--listen", "127.0.0.1:0", "--token-file", str(self.file)
        )
        assert self.serve.stdout is not None
        found = re.match(rb"http://127\.0\.0\.1:(\d+)/", self.serve.stdout.readline())
        assert found
        self.port, self.sections = int(found[1]), dict[str, Any]()
        self._connections: list[http.client.HTTPConnection] = []
        self._events = self._get("/api/events")

    def close(self) -> int:
        """The server's exit code."""
        for connection in self._connections:
            connection.close()
        self._events.close()
        self.serve.terminate()
        return self.serve.wait(20)

    def story(self, id: str) -> dict[str, Any]:
        return dict(json.loads(self._get(f"/api/machines/{id}").read()))

    def _get(self, path: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        self._connections.append(connection)
        connection.request("GET", path, headers={"Authorization": "Bearer a token for this test alone"})
        return connection.getresponse()

    def until(self, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The sections, once this is so."""
        while "machines" not in self.sections or not is_so(self.sections):
            line = self._events.readline()
            assert line, "the stream ended"
            if line.startswith(b"data:"):
                self.sections |= json.loads(line[5:])
        return self.sections


def first_is(state: str) -> Callable[[dict[str, Any]], bool]:
    """Is the first machine that is shown in this state?"""
    return lambda sections: [machine["state"] for machine in sections["machines"][:1]] == [state]


def test_a_machine_is_seen_from_its_first_state_to_its_end(belljar: Belljar, tmp_path: Path) -> None:
    page = Page(belljar, tmp_path)
    work = f'echo "{HOSTILE}" >/dev/console; echo up; read line'
    machine = belljar.popen("run", "--name", "seen", "--", "sh", "-c", work, stdin=subprocess.PIPE)
    assert machine.stdout is not None and machine.stdin is not None
    running = page.until(first_is("running"))["machines"][0]
    assert [name for name, _ in running["phases"]][-4:] == ["starting", "booting", "ready", "running"]
    assert machine.stdout.readline() == b"up\n"
    assert running["name"] == "seen" and running["user"] == running["user"].strip() != ""
    assert HOSTILE in page.story(running["id"])["console"]
    shown = belljar("top", "--once").stdout.decode()
    assert "1 machines (1 running)" in shown and "seen" in shown
    assert belljar.json("top", "--once")["totals"]["states"] == {"running": 1}
    machine.stdin.write(b"\n")
    machine.stdin.close()
    ended = page.until(first_is("ended"))["machines"][0]
    assert (ended["id"], ended["cause"]) == (running["id"], "finished")
    assert page.sections["totals"]["machines"] == 1 and page.sections["starts"][0]["count"] == 1
    second = belljar("monitor", "serve", "--listen", f"127.0.0.1:{page.port}", "--token-file", str(page.file))
    assert second.returncode == 125 and b"Address already in use" in second.stderr
    assert page.close() == 0


@IN_BROWSER
def test_a_browser_shows_machines_and_a_console_and_obeys_nothing_that_a_guest_wrote(
    belljar: Belljar, tmp_path: Path
) -> None:
    folder = _machine(belljar.run_folder / "machines", os.geteuid(), 2)
    (folder / "console.log").write_text(f"{HOSTILE}\n")
    page = Page(belljar, tmp_path)
    page.until(first_is("running"))
    address = f"http://127.0.0.1:{page.port}/#token=a+token+for+this+test+alone&machine={folder.name}"
    flags = (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'browser'}",
        "--dump-dom",
        f"--virtual-time-budget={VIRTUAL}",
    )
    words = ["chromium", *flags, address]
    text = subprocess.run(words, capture_output=True, timeout=200, check=True).stdout.decode()
    assert f">{folder.name}</button>" in text and "&lt;script&gt;document.title" in text
    assert "<img src=" not in text.split("<pre")[1]
    assert "<title>belljar" in text
    page.close()


@ROOT_ONLY
def test_root_sees_the_machines_of_the_users_of_this_node_as_they_come(belljar: Belljar, tmp_path: Path) -> None:
    """Each is looked at by a process that became that user; what one of them makes up changes nothing of the others."""
    node = Path(f"/var/tmp/belljar-test-node-{os.getpid()}")
    node.mkdir(mode=0o755)
    (node / "belljar.toml").write_text(f'[paths]\nnode = "{node}"\n')
    try:
        machines = {
            uid: _machine(node / str(uid) / "run/machines", uid, cpus)
            for uid, cpus in ((61001, 2), (61002, "many"), (61003, 4))
        }
        page = Page(belljar, tmp_path, "--config", str(node / "belljar.toml"))
        page.until(lambda seen: {machine["user"] for machine in seen["machines"]} == {"61001", "61002", "61003"})
        assert page.sections["totals"]["cpus"] == 6
        told = page.story(machines[61003].name)
        assert told["request"]["machine"]["cpus"] == 4
        with open(machines[61001] / "journal.jsonl", "a") as file:
            file.write('{"time":1.0,"event":"state","state":"stopping"}\n')
        page.until(lambda seen: seen["totals"]["states"] == {"running": 2, "stopping": 1})
        page.close()
    finally:
        shutil.rmtree(node)


def _machine(machines: Path, uid: int, cpus: object) -> Path:
    """That a user seems to have."""
    folder = machines / f"{uid:012x}"
    folder.mkdir(parents=True)
    (folder / "request.json").write_text(
        json.dumps({"requester": "slurm:7", "machine": {"image": "el9", "cpus": cpus}})
    )
    (folder / "journal.jsonl").write_text('{"time":1.0,"event":"state","state":"running"}\n')
    KEPT.append(try_lock(folder / "lock"))
    top = machines.parent.parent
    for path in (top, *top.rglob("*")):
        os.chown(path, uid, uid)
        path.chmod(0o700 if path.is_dir() else 0o600)
    return folder
