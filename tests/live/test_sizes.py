"""One template serves machines of every size: what the guest has is what was asked for, before the payload's first instruction."""

import json
from pathlib import Path

from tests.live.conftest import STORE, Belljar

SEES = (
    "nproc; cat /etc/machinefeatures/total_cpu; echo; awk '/MemTotal/{print $2} /HugePages_Total/{t=$2} /Hugepagesize/{print t*$2}'"
    " /proc/meminfo; cat /sys/block/vda/size; df -k --output=size / | tail -1; df -k --output=size /dev/shm | tail -1; ls /sys/class/net | tr '\\n' ' '"
)
GIB = 1 << 20  # of /proc/meminfo's unit


def test_clones_of_other_sizes_have_what_was_asked_for_when_the_payload_begins(
    belljar: Belljar, tmp_path: Path
) -> None:
    sizes = (
        ("--memory", "512M"),
        ("--cpus", "2", "--memory", "1800M"),
        ("--memory", "300M", "--network", "user"),
        ("--disk", "12G"),
    )
    belljar.env.update(BELLJAR_PATHS_STORE=str(tmp_path / "store"), BELLJAR_PATHS_SITE_STORE=str(STORE))
    seen, starts, peaks, templates = [], [], [], set()
    for words in sizes:
        report = tmp_path / "report"
        done = belljar.run(*words, "--report", str(report), "--", "sh", "-c", SEES)
        assert done.returncode == 0, done.stderr
        cpus, feature, total, held, sectors, files, shared, *cards = done.stdout.decode().split()
        seen.append((int(cpus), int(feature), int(total) - int(held), int(sectors), int(files), cards, int(shared)))
        outcome = json.loads(report.read_text())
        starts.append((outcome["start"], outcome["start_reason"]))
        peaks.append(outcome["host"]["peak_memory"] >> 10)
        templates.add(len(json.loads(belljar("template", "list", "--format", "json").stdout)))
    assert starts == [("clone", "")] * 4 and len(templates) == 1  # the first one made it, the others needed no more
    plain, large, small, wide = seen
    assert [one[:2] for one in seen] == [(1, 1), (2, 2), (1, 1), (1, 1)]
    assert 0.85 * GIB / 2 < plain[2] < GIB / 2
    assert 0.93 * 1800 * 1024 < large[2] < 1800 * 1024
    assert 0.75 * 300 * 1024 < small[2] < 300 * 1024
    assert peaks[2] < peaks[0] + 64 * 1024  # of 212 MiB that it did not ask for, the host gives next to nothing
    assert [one[5] for one in seen] == [["lo"], ["lo"], ["eth0", "lo"], ["lo"]]
    assert plain[6] < GIB / 4 and 0.45 * 1800 * 1024 < large[6] <= 900 * 1024
    assert wide[3] == 12 << 21 and wide[4] > plain[4] + 3 * GIB


TOUCH = """
import os
facts = dict(line.split()[:2] for line in open("/proc/meminfo"))
print(*(int(facts[name]) >> 10 for name in ("MemTotal:", "MemAvailable:")), flush=True)
reading, writing = os.pipe()
if not os.fork():
    kept = []
    while True:
        block = bytearray(1 << 20)
        block[::4096] = b"x" * 256
        kept.append(block)
        os.write(writing, b"x")
os.close(writing)
print(len(os.fdopen(reading, "rb").read()))
"""


def test_a_small_machine_can_touch_what_it_reports_as_available(belljar: Belljar) -> None:
    done = belljar.run("--memory", "288M", "--", "python3", "-c", TOUCH)
    total, available, touched = map(int, done.stdout.split())
    assert touched > 0.9 * available, done.stderr
    assert total < 288 + 64, "its template's other blocks of memory are offline"
