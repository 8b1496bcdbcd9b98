"""Stock images in a store: imported over http, as a site would, and kept between runs with their templates.

Each variant has a store of its own.
"""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.live.conftest import STORE, Belljar
from tests.live.stock.build import CACHE, build, recipe_of

from belljar.host.locks import locked

BOOT_TIMEOUT = "1500"  # seconds; a whole Debian under emulation, beside other tests on a busy host


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a plain web server on the loopback that serves this folder."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def stock(belljar: Belljar, name: str, *words: str) -> str:
    """Point *belljar* at a store that has the stock image `bookworm`, `trixie-xfs`, `bookworm-bare`..., imported with these
    further words; made now where it is missing. Returns the image's name."""
    disk = build(recipe_of(name))
    store = CACHE / "stores" / "-".join([disk.stem, *(word.strip("-") for word in words)])
    for parent in (store.parent.parent, store.parent, store):
        parent.mkdir(mode=0o755, exist_ok=True)
    belljar.env["BELLJAR_PATHS_STORE"] = str(store)
    belljar.env["BELLJAR_PATHS_SITE_STORE"] = str(STORE)
    belljar.env["BELLJAR_QEMU_BOOT_TIMEOUT"] = BOOT_TIMEOUT
    with locked(CACHE / f"{store.name}.lock", timeout=600, what=f"import the stock image {name}"):
        if belljar("image", "show", name).returncode:
            with served(CACHE) as address:
                done = belljar("image", "import", f"{address}/{disk.name}", "--name", name, *words)
            assert done.returncode == 0, done.stderr.decode()
    return name
