"""Old pilots of Nimbus report to the service: the body and the digest as their own code makes them (workspacepilot.py, notifyWithHTTP)."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.stories.lease.test_service import OWNER, House

from belljar.lease import LeaseState
from belljar.lease.service.legacy import Notices

SECRET = "a-secret-of-the-site"
NOW = "%Y-%m-%d-%H-%M-%S"


class Endpoint:
    def __init__(self, url: str) -> None:
        self.url = url

    def send(self, slot: str, host: str, event: str, code: int, text: str = "", secret: str = SECRET) -> int:
        """As notifyWithHTTP does; urllib2 became urllib.request, its handler of digests is the same."""
        body = f"{slot}+++{host}\npilot-{event}\n{code}\n" + (f"{text}\n" if text else "")
        passwords = urllib.request.HTTPPasswordMgrWithDefaultRealm()
        passwords.add_password(None, self.url, "pilotaccount", secret)
        opener = urllib.request.build_opener(urllib.request.HTTPDigestAuthHandler(passwords))
        try:
            with opener.open(self.url, body.encode(), timeout=20) as page:
                assert page.read() == b"OK\n"
                return int(page.status)
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code
        except ValueError:  # the handler gives up: asked again and again for a digest
            return 401

    async def sent(self, *words: object, **more: str) -> int:
        return await asyncio.to_thread(self.send, *words, **more)  # type: ignore[arg-type]


@asynccontextmanager
async def endpoint(house: House) -> AsyncIterator[Endpoint]:
    tell = lambda *a, **k: house.told.append((a[0], k))  # noqa: E731
    notices = Notices(house.settings, SECRET, house.daemon.store, house.daemon.hear, tell)
    async with notices.serve("127.0.0.1:0") as (_, port):
        yield Endpoint(f"http://127.0.0.1:{port}/pilot_notification/v01/")


def stamp(seconds: float = 0.0) -> str:
    return time.strftime(NOW, time.gmtime(time.time() + seconds))


async def test_old_pilots_claim_a_leases_nodes_and_give_them_back(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house, endpoint(house) as old:
        id = house.ask(2)
        await house.until_state(id, LeaseState.QUEUED)
        assert await old.sent(id, "n1", "test", 0) == 200
        assert await old.sent(id, "n1", "reserved", 0, stamp()) == 200
        assert await old.sent(id, "n1", "reserved", 0, stamp()) == 200  # the copy of one whose answer was lost
        assert house.lease(id).state is LeaseState.CLAIMING
        assert await old.sent(id, "n2", "reserved", 0, stamp()) == 200
        await house.until_state(id, LeaseState.ACTIVE)
        assert await old.sent(id, "n3", "reserved", 0, stamp()) == 406
        assert await old.sent(id, "n1", "earlyunreserving", 0, stamp()) == 200
        assert await old.sent(id, "n2", "killed", 0, "wrksp-7,wrksp-8") == 200
        assert await old.sent(id, "n2", "unreserving", 0) == 200
        await house.until(
            lambda: house.lease(id).state in (LeaseState.DRAINING, LeaseState.PREEMPTED, LeaseState.FAILED)
        )
        whys = {one.instance.cause.value for one in house.desk.machines(OWNER) if one.instance.cause}
        assert whys == {"Server.LrmPreempted", "Server.NodeLost"}


async def test_what_no_old_pilot_of_ours_sends_is_refused(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house, endpoint(house) as old:
        id = house.ask()
        await house.until_state(id, LeaseState.QUEUED)
        assert await old.sent(id, "n1", "reserved", 0, stamp(), secret="another-secret-of-it") == 401
        for words in (
            ("r-" + "0" * 17, "n1", "reserved", 0, stamp()), (id, "n1", "reserved", 0), (id, "n1", "reserved", 0, "now"),
            (id, "n/1", "reserved", 0, stamp()), ("a-uuid", "n1", "unreserving", 0), (id, "n1", "reign", 0),
        ):  # fmt: skip
            assert await old.sent(*words) == 406, words
        assert await old.sent(id, "n1", "reserved", 0, stamp(3600)) == 406  # its clock is an hour off
        assert await old.sent(id, "n1", "unreserving", 1, "'PILOT ERROR no such slot'") == 200  # told, and nothing more
        await house.until_state(id, LeaseState.QUEUED)


async def test_a_digest_is_good_once(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house, endpoint(house) as old:
        port = int(old.url.split(":")[2].split("/")[0])
        seen: list[bytes] = []

        async def through(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Keep what a pilot says, and pass it on."""
            request = await reader.readuntil(b"\r\n\r\n") + await reader.read(4096)
            seen.append(request)
            writer.write(await said(port, request))
            writer.close()

        proxy = await asyncio.start_server(through, "127.0.0.1", 0)
        between = Endpoint(old.url.replace(str(port), str(proxy.sockets[0].getsockname()[1])))
        assert await between.sent("r-" + "0" * 17, "n1", "test", 0) == 200
        assert len(seen) == 2 and b"Digest" in seen[1]
        assert (await said(port, seen[1])).startswith(b"HTTP/1.1 401 ")
        assert (await said(port, b"GET / HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 406 ")
        assert (await said(port, b"x" * 70_000)).startswith(b"HTTP/1.1 406 NOTOK: ")
        proxy.close()


async def said(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await reader.read()
    except OSError:
        return b""
    finally:
        writer.close()
