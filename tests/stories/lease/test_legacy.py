"""Old pilots of Nimbus report to the service: the body and the digest as their own code makes them (workspacepilot.py, notifyWithHTTP)."""

from __future__ import annotations

import asyncio
import io
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.stories.lease.test_service import OWNER, House

from belljar.lease import Cause, LeaseState
from belljar.lease.decisions.margins import KILL
from belljar.lease.service.legacy import Notices
from belljar.service.telling import teller

SECRET = "a-secret-of-the-site"
NOW = "%Y-%m-%d-%H-%M-%S"


class Endpoint:
    def __init__(self, url: str, told: io.StringIO) -> None:
        self.url, self.told = url, told  # what the service says of itself

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
    told = io.StringIO()
    notices = Notices(house.settings, SECRET, house.daemon.store, house.daemon.hear, teller(told, as_json=False))
    async with notices.serve("127.0.0.1:0") as (_, port):
        yield Endpoint(f"http://127.0.0.1:{port}/pilot_notification/v01/", told)


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
        early = stamp()
        assert await old.sent(id, "n1", "earlyunreserving", 0, early) == 200
        assert await old.sent(id, "n2", "killed", 0, "wrksp-7,wrksp-8") == 200
        assert await old.sent(id, "n2", "unreserving", 0) == 200
        await house.until(
            lambda: house.lease(id).state in (LeaseState.DRAINING, LeaseState.PREEMPTED, LeaseState.FAILED)
        )
        ends = {
            (one.instance.cause.value, one.instance.why) for one in house.desk.machines(OWNER) if one.instance.cause
        }
        assert ends == {
            ("Server.LrmPreempted", f"its pilot said earlyunreserving {early}"),
            ("Server.NodeLost", "its pilot said killed wrksp-7,wrksp-8"),
        }


async def test_what_a_pilot_says_that_had_to_kill_guests_is_told_in_words(tmp_path: Path) -> None:
    """Three notices at its slot's end; shell escapes and marks of line ends are its own."""
    async with House(tmp_path).up() as house, endpoint(house) as old:
        id = house.ask()
        await house.until_state(id, LeaseState.QUEUED)
        assert await old.sent(id, "n1", "reserved", 0, stamp()) == 200
        await house.until_state(id, LeaseState.ACTIVE)
        assert await old.sent(id, "n1", "unreserving", 0) == 200
        assert await old.sent(id, "n1", "killed", 0, "wrksp-7") == 200
        error = r"\'PILOT ERROR Pilot had a problem unreserving: KilledVMs: \| \#1: vmid\=7,name\=\'wrksp-7\' ]eol[ \'"
        assert await old.sent(id, "n1", "unreserving", 1, error) == 200
        (machine,) = (one.instance for one in house.desk.machines(OWNER))
        assert machine.cause is Cause.EXPIRED and machine.why == "its pilot said unreserving"
        assert "KilledVMs: | #1: vmid=7,name='wrksp-7' '" in old.told.getvalue()


async def test_an_old_pilot_gives_its_nodes_memory_back_before_its_job_is_cancelled(tmp_path: Path) -> None:
    """`unreserving` is said when that begins. It ends by itself; one that does not is cancelled after the time for that."""
    late = 0.0
    async with House(tmp_path).up(lambda: time.time() + late) as house, endpoint(house) as old:
        for ends_by_itself in (True, False):
            id = house.ask()
            await house.until_state(id, LeaseState.QUEUED)
            job = house.lease(id).job
            assert await old.sent(id, "n1", "reserved", 0, stamp()) == 200
            house.slurm.jobs[job][1] = "RUNNING"
            await house.until_state(id, LeaseState.ACTIVE)
            assert await old.sent(id, "n1", "unreserving", 0) == 200
            await house.until_state(id, LeaseState.DRAINING)
            asked = len(house.slurm.asked)
            await house.until(lambda asked=asked: house.slurm.asked[asked:].count("squeue") > 1)
            assert house.slurm.jobs[job][1] == "RUNNING"
            if ends_by_itself:
                house.slurm.end(job, "COMPLETED")
            else:
                late = house.settings.grace + 2 * KILL
            await house.until_state(id, LeaseState.EXPIRED)
            assert house.slurm.jobs[job][1] == ("COMPLETED" if ends_by_itself else "CANCELLED")


async def test_an_old_pilot_is_not_lost_for_saying_nothing_while_it_holds_its_node(tmp_path: Path) -> None:
    """It has no heartbeat. When its job has ended it is gone, though it said nothing of that."""
    late = 0.0
    async with House(tmp_path).up(lambda: time.time() + late) as house, endpoint(house) as old:
        id = house.ask()
        await house.until_state(id, LeaseState.QUEUED)
        assert await old.sent(id, "n1", "reserved", 0, stamp()) == 200
        house.slurm.jobs["1"][1] = "RUNNING"
        await house.until_state(id, LeaseState.ACTIVE)
        late = 10 * house.settings.lost
        asked = len(house.slurm.asked)
        await house.until(lambda: house.slurm.asked[asked:].count("squeue") > 1)
        assert house.lease(id).state is LeaseState.ACTIVE
        house.slurm.end("1", "NODE_FAIL")
        await house.until_state(id, LeaseState.FAILED)


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
        # Told, and nothing more.
        assert await old.sent(id, "n1", "unreserving", 1, r"\'PILOT ERROR no such slot ]eol[ \'") == 200
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
        between = Endpoint(old.url.replace(str(port), str(proxy.sockets[0].getsockname()[1])), old.told)
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
