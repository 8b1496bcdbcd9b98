"""boto3, aws cli and libcloud as their users call them, and a front end that they find on loopback."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from tests.unit.lease.ec2.house import KEY, SITE_KEY

from belljar.lease.ec2.front import served as serving
from belljar.lease.ec2.keyring import secret_of
from belljar.service.http.server import Sent


@contextmanager
def served(front: Any) -> Iterator[int]:
    """The port, while a thread serves it."""
    up, ended, loop = Future[int](), asyncio.Event(), asyncio.new_event_loop()

    async def serve() -> None:
        async with serving(front, "127.0.0.1:0") as (_, port):
            up.set_result(port)
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield up.result(10)
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)
        loop.close()


def client(port: int, key: str = KEY, kind: str = "client", **options: Any) -> Any:
    """boto3's; *kind*: client or resource."""
    import boto3
    from botocore.config import Config

    session = boto3.session.Session(key, secret_of(SITE_KEY, key), region_name="lab")
    config = Config(retries={"total_max_attempts": 1}, **options)
    return getattr(session, kind)("ec2", endpoint_url=f"http://127.0.0.1:{port}", config=config)


def wired(front: Any, key: str = KEY) -> Any:
    """boto3's client, whose requests reach the front end without a socket."""
    from botocore.awsrequest import AWSResponse

    def send(request: Any, **_: Any) -> Any:
        parts = urlsplit(request.url)
        headers = {name.lower(): _text(value) for name, value in request.headers.items()} | {"host": parts.netloc}
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        body = request.body or b""
        sent = Sent(
            request.method,
            target,
            tuple(headers.items()),
            body if isinstance(body, bytes) else body.encode(),
            "127.0.0.1",
        )
        answer = front.answer(sent)
        return AWSResponse(request.url, answer.status, {}, _Raw(answer.body))

    made = client(8444, key)
    made.meta.events.register("before-send.ec2", send)
    return made


def code(call: Any, **asked: Any) -> str:
    """EC2's, of what is refused; "": it is not."""
    from botocore.exceptions import ClientError

    try:
        call(**asked)
    except ClientError as exc:
        return str(exc.response["Error"]["Code"])
    return ""


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


class _Raw(io.BytesIO):
    def stream(self, **_: Any) -> Iterator[bytes]:
        yield self.read()
