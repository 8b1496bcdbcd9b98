"""Download a file over http or https by curl, in the sandbox: resumed, limited in size and in time.

Each redirect is a request of its own, so that its address is judged before anything is asked there. Proxies are those of this
process's environment. A download is `<key>.part`, with `<key>.head`, the head of the answer that began it: all of it is of one version
of the file. The caller holds the lock and checks the digest.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from belljar.errors import BelljarError, DownloadFailed, ImageCorrupt, ImageTooLarge, NoSpace
from belljar.host.files import PRIVATE_FILE, no_space_as_error
from belljar.host.guard.egress import is_public
from belljar.image import Settings
from belljar.image.intake import sandbox
from belljar.image.progress import Progress
from belljar.records import dataclass, replace

MOST_REDIRECTS = 5
MOST_FAILURES = 4  # in a row, none of which added to what was here
PAUSE = 0.5  # seconds after the first of them; twice as long after the next one
CONNECT_TIMEOUT = 30.0
LONGEST = 86400.0  # seconds for one download; the next one goes on where it stopped
SLOWEST = 1024  # bytes per second, over `image.stall_timeout`: single bytes must not keep us for ever
LARGEST_HEAD = 64 << 10
CURLS_OWN = (0, *range(3, 100))
REFUSED, REDIRECTED, TOO_LARGE = 22, 47, 63  # these and those of ERRORS: https://curl.se/docs/manpage.html#EXIT
BUSY = (408, 429, 500, 502, 503, 504)
NO_HEAD = (403, 405, 501)  # servers that answer GET alone: S3 says 403 where an address is signed for GET
SAFE = "!#$%&'()*+,-./:;=?@[]_~"  # in an address; all else is quoted
JUDGED = "judged.invalid"  # what curl connects to in place of a host whose addresses were judged


class _Broken(DownloadFailed):
    """The connection broke: try again."""


class _NotResumed(_Broken):
    """The server has no rest of this version."""


# 5 to 7: no name, no connection. Those behind 16 ended early.
ERRORS: Mapping[int, type[BelljarError]] = {
    23: NoSpace, 28: DownloadFailed, 33: _NotResumed,
    **dict.fromkeys((5, 6, 7, 16, 18, 35, 52, 55, 56, 92), _Broken),
}  # fmt: skip


@dataclass(frozen=True)
class _Order:
    url: str
    settings: Settings
    deadline: float  # of the monotonic clock
    public_only: bool
    options: tuple[str, ...] = ()  # lines of a configuration of curl
    fine: tuple[int, ...] = (200,)  # statuses of an answer that is not a failure


def key(source: str) -> str:
    """The file name under which a source's download and lock are kept."""
    return sha256(source.encode()).hexdigest()[:32]


def download(url: str, folder: Path, settings: Settings, progress: Progress, *, public_only: bool = False) -> Path:
    """Get the file whole. Goes on after a broken connection, and after the death of another process, as long as bytes keep
    coming. *public_only*: from no address of this host or of a private network, whatever a name leads to. Raises DownloadFailed
    (which keeps what came), ImageTooLarge, NoSpace, CommandMissing."""
    part, head = (folder / f"{key(url)}.{ending}" for ending in ("part", "head"))
    with no_space_as_error(folder):
        for path in (part, head):
            path.touch(PRIVATE_FILE)
    try:
        _whole(_Order(url, settings, time.monotonic() + LONGEST, public_only), part, head, progress)
    except ImageTooLarge:
        part.unlink()
        head.unlink()
        raise
    head.unlink()
    return part


def small_file(url: str, largest: int, *, patience: float, public_only: bool = False) -> bytes:
    """A file that fits into memory, within *patience* seconds, however slowly its bytes come. The rest is as for `download`."""
    settings = Settings(max_size=largest, stall_timeout=patience)
    with sandbox.in_memory() as part, sandbox.in_memory() as head:
        _whole(_Order(url, settings, time.monotonic() + patience, public_only), part, head, Progress())
        return part.read_bytes()


def version(url: str, settings: Settings, *, public_only: bool = False) -> str:
    """What the server calls the version that it has now; "" where it does not say. Raises what `small_file` does."""
    deadline = time.monotonic() + settings.stall_timeout
    order = _Order(url, settings, deadline, public_only, options=("head",), fine=(200, *NO_HEAD))
    with sandbox.in_memory() as out, sandbox.in_memory() as head:
        _ask(order, out, head)
        return _version(_head(head))


def _whole(order: _Order, part: Path, head: Path, progress: Progress) -> None:
    """Get what is missing of a file, by one connection after the other."""
    name, failures = shown(order.url), 0
    watch = lambda: progress.amount(part.stat().st_size, int(_head(head).get("total", 0)) or None)  # noqa: E731
    while True:
        if not (version := _version(_head(head))):
            part.write_bytes(b"")
        start = part.stat().st_size
        resuming = (_line("continue-at", start), _line("header", f"If-Range: {version}"))
        request = replace(order, options=resuming, fine=(200, 206, 416)) if start else order
        progress.step(f"Downloading {name}" + (f" from byte {start}" if start else ""))
        problem, is_useless = "", False
        with sandbox.in_memory() as more:
            try:
                _ask(request, part, more if start else head, watch)
            except _Broken as exc:
                problem, is_useless = exc.message, isinstance(exc, _NotResumed)
            first, rest = _head(head), _head(more)
        size, is_fit = part.stat().st_size, _fit(first, rest)
        if not problem:
            if is_fit and {known["total"] for known in (first, rest) if "total" in known} <= {str(size)}:
                return
            problem, is_useless = f"{name}: {size} bytes came, which are not the whole file", size == start
        if is_useless or not is_fit:
            head.write_bytes(b"")  # begin anew
        failures = 0 if start and size > start and is_fit else failures + 1
        if failures == MOST_FAILURES or time.monotonic() + PAUSE * failures >= order.deadline:
            raise DownloadFailed(problem)
        time.sleep(PAUSE * failures)


def _ask(order: _Order, out: Path, head: Path, watch: Callable[[], object] | None = None) -> None:
    """One request, and up to five redirects. A server of the whole internet sends nobody to what only this host or its site reaches:
    no question is put there."""
    url, must_be_public, name = quote(order.url, safe=SAFE), order.public_only, shown(order.url)
    was_safe = False
    for _ in range(MOST_REDIRECTS + 1):
        scheme = url.partition(":")[0].lower()
        if scheme not in ("http", "https"):
            raise DownloadFailed(f"{name}: leads to {scheme}, which belljar does not follow")
        if was_safe and scheme == "http":
            raise DownloadFailed(f"{name}: redirected from https to http", hint="Name an address that stays https.")
        end = _run(order, [_line("url", url), *_route(name, url, must_be_public)], out, head, watch)
        if end["exitcode"] != REDIRECTED:
            return _check(order, end, out.stat().st_size)
        must_be_public, was_safe = must_be_public or is_public(end["remote_ip"]), scheme == "https"
        url = quote(end["redirect_url"], safe=SAFE, errors="surrogateescape")
    raise DownloadFailed(f"{name}: more than {MOST_REDIRECTS} redirects")


def _route(name: str, url: str, must_be_public: bool) -> list[str]:
    """How curl gets there: by the environment's proxy, or to addresses that are looked up once, here, and judged."""
    from urllib.request import getproxies, proxy_bypass

    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        proxy = getproxies().get(parts.scheme) or getproxies().get("all")
        if proxy and not proxy_bypass(f"{host}:{port}"):
            if must_be_public:
                what = "only public hosts are allowed, and a proxy looks names up for itself"
                raise DownloadFailed(f"{name}: {what}", hint="Name its host in `no_proxy`.")
            return [_line("proxy", proxy)]
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as exc:
        raise _Broken(f"{name}: {host}: {exc.strerror}") from exc
    except ValueError as exc:  # UnicodeError too, of what cannot be a host's name
        raise DownloadFailed(f"{name}: {exc}") from exc
    addresses = dict.fromkeys(str(place[4][0]) for place in places)
    if must_be_public and (inside := [address for address in addresses if not is_public(address)]):
        what = f"leads to {inside[0]}, which is an address of this host or of a private network"
        raise DownloadFailed(f"{name}: {what}", hint="Name the address itself where that is meant.")
    peers = ",".join(f"[{address}]" if ":" in address else address for address in addresses)
    return [_line("connect-to", f"::{JUDGED}:{port}"), _line("resolve", f"{JUDGED}:{port}:{peers}")]


def _run(order: _Order, lines: list[str], out: Path, head: Path, watch: Callable[[], object] | None) -> Any:
    """How the request ended, as curl says it: https://curl.se/docs/manpage.html#-w"""
    settings, left = order.settings, max(order.deadline - time.monotonic(), 0.1)
    values = {
        "proto": "=http,https", "max-redirs": 0, "max-filesize": settings.max_size, "max-time": left, "write-out": "%{json}",
        "connect-timeout": min(CONNECT_TIMEOUT, settings.stall_timeout), "speed-limit": SLOWEST,
        "speed-time": max(round(settings.stall_timeout), 1),
    }  # fmt: skip
    trusted = ssl.get_default_verify_paths()
    if trusted.cafile not in (None, trusted.openssl_cafile):  # SSL_CERT_FILE names another one
        values["cacert"] = trusted.cafile
    words = ["silent", "no-buffer", "fail", "globoff", "location", "suppress-connect-headers", *order.options, *lines]
    words += [_line(option, value) for option, value in values.items()]
    argv = ["curl", "-q", "--config", "-", "--output", "{0}", "--dump-header", "{1}"]
    largest = max(settings.max_size, LARGEST_HEAD)
    try:
        with sandbox.in_memory() as config:  # on a command line others see what it says
            config.write_text("\n".join(words))
            printed = sandbox.run(
                argv, [], int(left) + 60, largest, writable=[out, head], stdin=config, fine=CURLS_OWN, watch=watch
            )
        return json.loads(printed.decode(errors="surrogateescape"))
    except ImageTooLarge as exc:
        raise ImageTooLarge(f"{shown(order.url)}: more than the limit of {settings.max_size} bytes") from exc
    except (ImageCorrupt, ValueError) as exc:  # it was killed, or is too old for an option
        raise DownloadFailed(f"{shown(order.url)}: {exc}") from exc


def _check(order: _Order, end: Mapping[str, Any], size: int) -> None:
    """Raises what became of a request that did not succeed."""
    code, status, name = end["exitcode"], end["http_code"], shown(order.url)
    if status < 300 and (code == TOO_LARGE or size > order.settings.max_size):
        raise ImageTooLarge(f"{name}: more than the limit of {order.settings.max_size} bytes")
    if status not in order.fine or (code and code != REFUSED):
        error = _Broken if status in BUSY else ERRORS.get(code, DownloadFailed)
        what = f"the server says {status}" if status >= 300 or not code else end["errormsg"]
        what += f" ({size} bytes so far)" if size else ""
        raise error(f"{name}: {what}".replace(JUDGED, urlsplit(order.url).hostname or ""))


def _line(option: str, value: object) -> str:
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'{option} = "{text}"'


def _head(path: Path) -> dict[str, str]:
    """What an answer that has the file, or a part of it, says of it: status, etag, last-modified, and the total size."""
    text = re.split(r"(?m)^HTTP/", path.read_bytes().decode("latin-1"))[-1]
    if not (status := re.match(r"\S+ (200|206|416)\b", text)):
        return {}
    lines = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    total = lines.get("content-range", "").rpartition("/")[2] or lines.get("content-length", "")
    head = {name: lines[name] for name in ("etag", "last-modified") if name in lines} | {"status": status[1]}
    return head | {"total": total} if re.fullmatch("[0-9]{1,19}", total) else head


def _version(head: Mapping[str, str]) -> str:
    """What the server calls this version of the file: a strong ETag, or its date; "" for what is neither or cannot be sent back."""
    names = (head.get("etag", ""), head.get("last-modified", ""))
    return next((name for name in names if name[:2] not in ("", "W/") and name.isascii() and name.isprintable()), "")


def _fit(head: Mapping[str, str], more: Mapping[str, str]) -> bool:
    """Is the second answer, if there was one, the rest of the file that the first one began, as far as they say?"""
    both = head.keys() & more.keys() & {"etag", "last-modified", "total"}
    return more.get("status") != "200" and all(head[name] == more[name] for name in both)


def local_path(source: str) -> Path | None:
    """The file or folder of a path or a file: address."""
    if "://" not in source:
        return Path(source)
    parts = urlsplit(source)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def shown(url: str) -> str:
    """The address without its password."""
    try:
        parts = urlsplit(url)
    except ValueError as exc:
        raise DownloadFailed(f"{url!r}: {exc}") from exc
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
