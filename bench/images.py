"""MB per second of an image's way: import, verification, publication, sync; beside what the bytes alone cost in one run.

MB are those of the image's disk as it is stored (a qcow2 file), whatever form it travels in.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common import interleaved, parser, publish, seconds, summary, table


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--runs", type=int, default=3)
    args = arguments.parse_args()
    shown = subprocess.run(
        [args.belljar, "image", "show", args.image, "--format", "json"], capture_output=True, check=True
    )
    image = json.loads(shown.stdout)
    disk = Path(image["disk"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case = Cases(args.belljar, args.image, disk, folder)
        with case.served() as address:
            cases: dict[str, Callable[[], float]] = {
                "cp": case.copied, "sha256sum": lambda: seconds(["sha256sum", str(disk)]),
                "qemu-img convert": case.converted, "zstd -d": case.unpacked,
                "image verify": lambda: seconds([args.belljar, "image", "verify", args.image]),
                "image import": case.imported, "image publish": case.published,
                "image sync, folder": lambda: case.synced(str(case.master)), "image sync, http": lambda: case.synced(address),
            }  # fmt: skip
            times = interleaved(cases, args.runs)
    size = disk.stat().st_size / 1e6
    medians = {name: summary(values)["median"] for name, values in times.items()}
    rates = {name: size / max(value, 1e-6) for name, value in medians.items()}
    rows = [(name, medians[name], rates[name], rates[name] / rates["cp"]) for name in rates]
    table(("what", "seconds", "MB/s", "of cp"), rows)
    published = case.packed_size / 1e6
    print(f"disk {size:.0f} MB, packed {published:.0f} MB")
    figures = {"benchmark": "images", "mb": size, "packed_mb": published, "seconds": medians, "mb_per_second": rates}
    publish(args, figures)


class Cases:
    """The things that are timed, each with what it needs."""

    def __init__(self, belljar: str, image: str, disk: Path, folder: Path) -> None:
        self.belljar, self.image, self.disk, self.folder = belljar, image, disk, folder
        self.master, self.keys = folder / "master", folder / "keys"
        words = ["image", "publish", "--init", "--to", str(self.master), "--key", str(self.keys)]
        self.line = subprocess.run([belljar, *words], capture_output=True, check=True).stdout.decode().strip()
        self.published()
        (self.blob,) = (self.master / "targets" / image).glob("*.disk.qcow2.zst")
        self.packed_size = self.blob.stat().st_size

    def copied(self) -> float:
        return self._and_gone(
            ["cp", "--reflink=never", str(self.disk), str(self.folder / "copy")], self.folder / "copy"
        )

    def converted(self) -> float:
        out = self.folder / "converted"
        return self._and_gone(["qemu-img", "convert", "-f", "qcow2", "-O", "qcow2", str(self.disk), str(out)], out)

    def unpacked(self) -> float:
        out = self.folder / "unpacked"
        return self._and_gone(["zstd", "-dqf", str(self.blob), "-o", str(out)], out)

    def imported(self) -> float:
        return self._in_a_store(["import", str(self.disk), "--name", "again"])

    def published(self) -> float:
        words = ["image", "publish", self.image, "--to", self.line, "--key", str(self.keys)]
        return seconds([self.belljar, *words], stderr=subprocess.DEVNULL)

    def synced(self, source: str) -> float:
        return self._in_a_store(["sync", self.image, "--from", f"{source}#{self.line.partition('#')[2]}"])

    @contextmanager
    def served(self) -> Iterator[str]:
        """The master store on the loopback."""

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *_: object) -> None: ...

        handler = functools.partial(Handler, directory=str(self.master))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def _in_a_store(self, words: list[str]) -> float:
        store = self.folder / "store"
        env = {**os.environ, "BELLJAR_PATHS_STORE": str(store)}
        took = seconds([self.belljar, "image", *words], env=env, stderr=subprocess.DEVNULL)
        shutil.rmtree(store)
        return took

    @staticmethod
    def _and_gone(command: list[str], path: Path) -> float:
        took = seconds(command)
        path.unlink()
        return took


if __name__ == "__main__":
    main()
