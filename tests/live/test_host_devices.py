"""Devices of the host in real guests: plugged into clones and cold starts; and, under an emulated IOMMU, by VFIO itself.

`CARDS` is belljar with emulated controllers in place of the host's: what QEMU and the guest do is the same, and no host needs
an IOMMU for it. The slow test boots this host's own files, read-only, as an outer machine that has an IOMMU, and runs belljar in it;
the outer machine's QEMU is Debian 13's, which has a card with virtual functions.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.live.conftest import STORE, Belljar, Completed
from tests.roots import files

from belljar.journal import read

ROOT = Path(__file__).parents[2]
ADDRESSES = ("0000:41:00.0", "0000:42:00.0")
CARDS = f"""
import sys
sys.path[:] = {sys.path!r}
from pathlib import Path
from belljar.host.devices.pci import Device
from belljar.hypervisor.devices.pci import HostDevices
from belljar.machine.extras import devices
real = HostDevices.plugged
def cards(self, spec):
    return [{{"driver": "nvme", "serial": it["id"], "id": it["id"], "bus": it["bus"]}} for it in real(self, spec)]
def take(self):
    for word in self._words:
        facts = ("1b36", "0010", "0108", "vfio-pci", "1", -1, ("flr",), (0, 0))
        self._devices.append(Device(word, Path("/"), "function", *facts))
HostDevices.plugged = cards
devices.Devices._take, devices.lock_memory = take, lambda memory: None
from belljar.cli import entry
entry()
"""


def run(belljar: Belljar, *words: str) -> Completed:
    argv = [sys.executable, "-c", CARDS, "run", *(word for it in ADDRESSES for word in ("--device", it)), *words]
    return subprocess.run(
        argv, env=belljar.env, capture_output=True, timeout=240, check=False, stdin=subprocess.DEVNULL
    )


@pytest.mark.parametrize("start", ["clone", "cold"])
def test_the_job_starts_when_the_guests_drivers_have_its_devices(belljar: Belljar, start: str) -> None:
    done = run(belljar, "--start", start, "--", "sh", "-c", "cat /sys/class/nvme/*/serial; ls /dev/nvme0 /dev/nvme1")
    assert done.returncode == 0, done.stderr.decode()
    assert sorted(done.stdout.split()) == [b"/dev/nvme0", b"/dev/nvme1", b"host0", b"host1"]
    (machine,) = belljar.json("ps", "-a")
    assert machine["start"] == start
    events = [event for event in read(belljar.logs / machine["id"]) if event["event"] == "device-seen"]
    assert [(event["address"], event["driver"]) for event in events] == [(address, "nvme") for address in ADDRESSES]
    assert belljar.leftovers() == []


# -- by VFIO, in a machine in a machine ---------------------------------------------------------------------------------

# The template is made here, where that takes seconds: inside its clones are found by the same key, which has the outer machine's size.
PREPARE = f"""
import sys
sys.path[:] = {sys.path!r}
from pathlib import Path
from belljar.assembly import Runtime
from belljar.host.caller import caller
from belljar.hypervisor import HostDevice
from belljar.hypervisor.qemu.template import plugging
from belljar.jobs.attend import build_template
from belljar.jobs.starting import make_request
from belljar.machine import supervisor
from belljar.machine.extras import Equipment
from belljar.model import Payload, RunPayload
card, frame_of = HostDevice("", (1 << 14, 0)), plugging.frame_of
plugging.frame_of = lambda *args, **facts: frame_of(*args, **{{**facts, "cpus": 2, "total": 5 << 30}})
supervisor.Equipment = lambda: Equipment(devices=(card,))
runtime = Runtime()
request = make_request(runtime.settings, RunPayload(Payload((), caller())), image="@IMAGE@", devices=("given:1",))
print(build_template(runtime, request, exact=True).key)
"""
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay", "vfio_iommu_type1", "vfio-pci", "nvme", "igb", "igbvf")
WORD = "of the host's own device\n"
# One is driven by a module of the image's; for the other a warm image has loaded it.
CASES = {
    "whole": {
        "IMAGE": "debian12", "MATCH": "class=0108", "SETUP": "", "DEVICE": "0000:00:06.0", "KIND": "function", "DRIVER": "nvme",
        "JOB": f"head -c {len(WORD)} /dev/nvme0n1", "SEEN": WORD,
    },
    "virtual": {
        "IMAGE": f"igbvf-{os.getpid()}", "MATCH": "vendor=8086 kind=virtual",
        "SETUP": "busybox ip link set eth0 up; echo 2 > /sys/bus/pci/devices/0000:00:07.0/sriov_numvfs",
        "DEVICE": "0000:00:17.0", "KIND": "virtual", "DRIVER": "igbvf", "SEEN": "reply from 10.0.2.2 [52:55:",
        "JOB": "busybox ip link set eth0 up; busybox ip addr add 10.0.2.9/24 dev eth0;"
               " until busybox arping -f -w 5 -I eth0 10.0.2.2; do sleep 1; done",
    },
}  # fmt: skip
INIT = """\
#!/bin/sh
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for module in $(cat /modules/order); do insmod /modules/$module; done
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose host /host
mount -t tmpfs -o size=3g tmp /run
mkdir -p /run/upper /run/work /new
mount -t overlay -o lowerdir=/host,upperdir=/run/upper,workdir=/run/work overlay /new
mount -t proc proc /new/proc; mount -t sysfs sys /new/sys; mount --bind /dev /new/dev
mkdir -p /new/dev/shm; mount -t tmpfs shm /new/dev/shm; mount -t tmpfs run /new/run
chroot /new /bin/sh @INSIDE@
poweroff -f
"""
# The store's files have other inode numbers there, and are those that were stored.
INSIDE = """\
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root PYTHONPATH=@ROOT@/src @PATHS@
export BELLJAR_QEMU_ACCELERATOR=tcg BELLJAR_QEMU_BOOT_TIMEOUT=1500s BELLJAR_QEMU_QMP_TIMEOUT=120s
export BELLJAR_MACHINE_CLONE_TIMEOUT=300s BELLJAR_MACHINE_DEVICE_TIMEOUT=300s
mkdir /run/site; cd /run/site; touch belljar.toml
printf '[class.given]\\nmatch = ["@MATCH@"]\\n' > devices.toml
@PYTHON@ - <<'END'
import json, os, subprocess
from pathlib import Path
from belljar.hypervisor.qemu.template.folders import identity
for path in Path("@STORE@/images").glob("sha256-*/manifest.json"):
    manifest = json.loads(path.read_bytes())
    for name, facts in manifest["files"].items():
        facts["ino"] = os.stat(path.with_name(name)).st_ino
    path.unlink()
    path.write_text(json.dumps(manifest))
os.mkdir("/run/templates", 0o700)
subprocess.run(["cp", "-a", "--sparse=always", "@STORE@/templates/@KEY@", "/run/templates/"], check=True)
subprocess.run(["mount", "--bind", "/run/templates", "@STORE@/templates"], check=True)
path = Path("@STORE@/templates/@KEY@/manifest.json")
manifest = json.loads(path.read_bytes())
manifest["files"] = {name: identity(os.lstat(path.with_name(name))) for name in manifest["files"]}
path.write_text(json.dumps(manifest))
END
belljar() { @PYTHON@ -m belljar --config /run/site/belljar.toml "$@"; }
said() { echo "== $1: $?"; }
job='@JOB@'
@SETUP@
belljar device bind @DEVICE@ --user root; said bound
belljar device list; belljar device check; said checked
belljar run --image @IMAGE@ --device given:1 -- sh -c "$job"; said ran
belljar run --image @IMAGE@ --device pci:@DEVICE@ --name held -- sh -c "$job; sleep 40" & held=$!
until belljar ps | grep -q running; do sleep 1; done
belljar run --image @IMAGE@ --device given:1 -- true; said refused
belljar device release @DEVICE@; said busy
wait $held; said ended
@PYTHON@ -m belljar --config /run/site/belljar.toml run --image @IMAGE@ --device given:1 -- sleep 1000 & killed=$!
until belljar ps | grep -q running; do sleep 1; done
kill -9 $killed; wait $killed; belljar reap
belljar device release @DEVICE@; said released
readlink /sys/bus/pci/devices/@DEVICE@/driver
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", CASES)
def test_a_device_by_vfio_in_a_machine_of_a_machine(belljar: Belljar, tmp_path: Path, case: str) -> None:
    """It prints what it does; some minutes, on a busy host many."""
    for program in ("apt-get", "dpkg-deb", "depmod", "cpio", "busybox", "mmdebstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    belljar.env["BELLJAR_QEMU_ACCELERATOR"] = "tcg"
    words = CASES[case]
    kernel = make_initrd(tmp_path, belljar.json("image", "show", "debian12")["facts"]["release"])
    try:
        if words["IMAGE"] != "debian12":
            module = next((tmp_path / "all").rglob(f"{words['DRIVER']}.ko*"))
            recipe = ("--from", "debian12", "--in", str(module), "--user", "0:0", "--cwd", "/root")
            made = belljar("image", "warm", words["IMAGE"], *recipe, "--", "insmod", module.name)
            assert made.returncode == 0, made.stderr.decode()
        said = outer_machine(belljar, tmp_path, kernel, words)
    finally:
        if words["IMAGE"] != "debian12":
            belljar("image", "remove", words["IMAGE"])
    print(said)
    for step, code in (
        ("bound", 0), ("checked", 0), ("ran", 0), ("refused", 125), ("busy", 125), ("ended", 0), ("released", 0),
    ):  # fmt: skip
        assert f"== {step}: {code}\n" in said
    assert re.search(f"^{words['DEVICE']} +given +[0-9a-f:]+ +{words['KIND']} +[0-9]+ +vfio-pci ", said, re.MULTILINE)
    assert said.count(words["SEEN"]) == 2
    assert said.count("another machine has it") + said.count("another process has it") == 2
    assert said.rstrip().splitlines()[-2 if "Power down" in said else -1].endswith(f"/drivers/{words['DRIVER']}")


def outer_machine(belljar: Belljar, folder: Path, kernel: Path, words: dict[str, str]) -> str:
    """What it writes to its console, to its end."""
    prepare = [sys.executable, "-c", filled(PREPARE, words)]
    made = subprocess.run(prepare, env=belljar.env, capture_output=True, text=True, check=True)
    paths = " ".join(f"BELLJAR_PATHS_{name.upper()}=/run/{name}" for name in ("run", "scratch", "logs"))
    more = {
        "ROOT": ROOT, "PATHS": f"{paths} BELLJAR_PATHS_STORE={STORE}", "PYTHON": sys.executable, "STORE": STORE,
        "KEY": made.stdout.split()[-1],
    }  # fmt: skip
    (folder / "inside.sh").write_text(filled(INSIDE, words | more))
    (folder / "disk").write_text(WORD)
    os.truncate(folder / "disk", 64 << 20)
    root = files("trixie", ["qemu-system-x86"])
    libraries = root / "usr/lib/x86_64-linux-gnu"
    subprocess.run(
        [
            str(libraries / "ld-linux-x86-64.so.2"), "--library-path", str(libraries), str(root / "usr/bin/qemu-system-x86_64"),
            *(word for name in ("qemu", "seabios") for word in ("-L", str(root / "usr/share" / name))),
            "-nodefaults", "-display", "none", "-no-reboot", "-machine", "q35,accel=tcg,kernel-irqchip=split",
            "-cpu", "max", "-smp", "2", "-m", "5G", "-device", "intel-iommu,intremap=on,caching-mode=on",
            "-drive", f"file={folder}/disk,format=raw,if=none,id=disk,snapshot=on",
            "-device", "nvme,drive=disk,serial=nested,bus=pcie.0,addr=0x6",
            "-netdev", "user,id=net,restrict=on", "-device", "igb,netdev=net,bus=pcie.0,addr=0x7,romfile=",
            "-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap",
            "-device", "virtio-9p-pci,fsdev=host,mount_tag=host", "-serial", f"file:{folder}/said",
            "-kernel", str(kernel), "-initrd", str(folder / "initrd"),
            "-append", "console=ttyS0 quiet panic=-1 intel_iommu=on mitigations=off tsc=reliable no_timer_check lpj=4000000",
        ],
        check=True, timeout=3000,
    )  # fmt: skip
    return (folder / "said").read_text(errors="replace").replace("\r", "")


def filled(text: str, words: Mapping[str, object]) -> str:
    for name, value in words.items():
        text = text.replace(f"@{name}@", str(value))
    return text


def make_initrd(folder: Path, release: str) -> Path:
    """The image's kernel, from Debian, with what it takes to go on with this host's files. Returns the kernel."""
    subprocess.run(["apt-get", "download", f"linux-image-{release}"], cwd=folder, check=True)
    subprocess.run(["dpkg-deb", "-x", str(next(folder.glob("*.deb"))), "all"], cwd=folder, check=True)
    (modules,) = (folder / "all/lib/modules").iterdir()
    subprocess.run(["depmod", "-b", str(folder / "all"), modules.name], check=True)
    needs = dict(line.split(":", 1) for line in (modules / "modules.dep").read_text().splitlines())
    order = list[str]()
    for module in MODULES:
        path = next(
            path for path in needs if path.rpartition("/")[2].partition(".")[0] in (module, module.replace("-", "_"))
        )
        order += [it for it in (*reversed(needs[path].split()), path) if it not in order]
    tree = folder / "tree"
    for name in ("bin", "modules", "proc", "sys", "dev", "host", "run"):
        (tree / name).mkdir(parents=True)
    for path in order:
        shutil.copy(modules / path, tree / "modules")
    (tree / "modules/order").write_text("\n".join(path.rpartition("/")[2] for path in order))
    shutil.copy(shutil.which("busybox") or "", tree / "bin/busybox")
    (tree / "bin/sh").symlink_to("busybox")
    (tree / "init").write_text(INIT.replace("@INSIDE@", str(folder / "inside.sh")))
    (tree / "init").chmod(0o755)
    names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*"))).encode()
    with open(folder / "initrd", "wb") as file:
        subprocess.run(["cpio", "-o", "-H", "newc", "--quiet"], cwd=tree, input=names, stdout=file, check=True)
    return next((folder / "all/boot").glob("vmlinuz-*"))
