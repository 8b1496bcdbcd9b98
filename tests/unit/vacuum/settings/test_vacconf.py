"""Files of Vac become a vacuum.toml that loads; the report has every word."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from belljar.errors import BadSettings, InputMissing
from belljar.model import MIB
from belljar.vacuum import Mode, Space
from belljar.vacuum.settings.settings import load
from belljar.vacuum.settings.vacconf import Imported, read
from belljar.vacuum.settings.vocabulary import Fate

# As the example that came with 03.00, with our values.
NEW = """\
[settings]
vac_space = vac01.example.org
factories = wn01.example.org
    WN02.example.org
total_processors = 16
processors_per_superslot = 8
mb_per_processor = 2500
disk_gb_per_processor = 40
hs06_per_processor = 10.5
overload_per_processor = 1.5
udp_timeout_seconds = 20
shutdown_time = 1800000000
draining = Yes
gocdb_sitename = UKI-EXAMPLE
vacmon_hostport = Mon.example.org:8884 mon2.example.org:8884
volume_group = vg
version_logger = 1
user_data_option_cvmfs_proxy = http://squid.example.org:3128   ; all of them
machinefeatures_option_rack = 7
frobnicate = yes

[machinetype LHCb-prod]
target_share = 2.5
machine_model = cernvm3
root_image = https://repo.example.org/cernvm3.iso
user_data = user_data
backoff_seconds = 600
fizzle_seconds = 300
max_wallclock_seconds = 86400
min_wallclock_seconds = 9000
min_processors = 1
max_processors = 8
heartbeat_file = vm-heartbeat
heartbeat_seconds = 600
accounting_fqan = /lhcb/Role=pilot
machinegroup = lhcb
user_data_proxy = true
legacy_proxy = true
user_data_option_queue = long
user_data_file_hostcert = hostcert.pem
user_data_file_other = /etc/other.pem
image_signing_dn = /CN=x
machines_dir_days = 3

[vacuum_pipe gds]
vacuum_pipe_url = https://gds.example.org/pipe.json
target_share = 6
backoff_seconds = 900

[machinetype gds-prod]
target_share = 4
"""
# As the one that came with 0.14, with our values.
OLD = """\
[settings]
vac_space = vac02.example.org
mb_per_machine = 4096
total_machines = 4
cpu_per_machine = 2
hs06_per_machine = 20
scratch_gb = 25
domain_type = kvm
delete_old_files = yes
cycle_seconds = 90
[factories]
names = wn01.example.org wn02.example.org
[vmtype example]
root_image = /var/lib/vac/images/cernvm.hdd
rootpublickey = /root/.ssh/id_rsa.pub
user_data = user_data
prolog = prolog.sh
epilog = epilog.sh
shutdown_command = /etc/vmtypefiles/vac-shutdown-vm
log_machineoutputs = True
max_wallclock_seconds = 3600
[targetshares]
example = 3
"""


@pytest.fixture
def imported(tmp_path: Path) -> Callable[..., tuple[Imported, Space]]:
    def imported(*texts: str) -> tuple[Imported, Space]:
        files = []
        for number, text in enumerate(texts):
            files.append(tmp_path / f"{number}.conf")
            files[-1].write_text(text)
        made = read(files)
        path = tmp_path / "vacuum.toml"
        path.write_text(made.text)
        return made, load(path)

    return imported


Import = Callable[..., tuple[Imported, Space]]


def fates(made: Imported) -> dict[str, str]:
    return {line.option: line.fate.value for line in made.lines if line.option}


def test_a_file_of_today_is_mapped(imported: Import) -> None:
    made, space = imported(NEW)
    assert (space.name, space.site, space.mode) == ("vac01.example.org", "UKI-EXAMPLE", Mode.COMPATIBLE)
    assert space.factories == ("wn01.example.org", "WN02.example.org")
    assert (space.processors, space.processors_per_superslot, space.memory) == (16, 8, 2500 * MIB)
    assert (space.disk, space.hs06, space.overload) == (40 * 10**9, 10.5, 1.5)
    assert (space.poll_silence, space.poll_limit) == (4.0, 24.0)
    assert (space.shutdown_time, space.draining) == (1.8e9, True)
    assert space.vacmon == ("mon.example.org:8884", "mon2.example.org:8884")
    (one,) = space.types
    assert (one.name, one.share, one.image) == ("lhcb-prod", 2.5, "https://repo.example.org/cernvm3.iso")
    assert (one.backoff, one.fizzle, one.max_wallclock, one.min_wallclock) == (600, 300, 86400, 9000)
    assert (one.min_processors, one.max_processors, one.fqan, one.group) == (1, 8, "/lhcb/Role=pilot", "lhcb")
    assert (one.heartbeat_file, one.heartbeat, one.legacy_proxy) == ("vm-heartbeat", 600, True)
    folder = Path("/var/lib/vac/machinetypes/lhcb-prod")
    assert one.user_data == f"{folder}/files/user_data"
    assert one.proxy == (folder / "x509cert.pem", folder / "x509key.pem")
    assert dict(one.options) == {"cvmfs_proxy": "http://squid.example.org:3128", "queue": "long"}
    assert dict(one.option_files) == {"hostcert": folder / "files/hostcert.pem", "other": Path("/etc/other.pem")}
    (pipe,) = space.pipes
    assert (pipe.url, pipe.share, dict(pipe.given)["backoff"]) == ("https://gds.example.org/pipe.json", 6.0, 900.0)
    assert pipe.files == Path("/var/lib/vac/machinetypes/gds/files")
    assert pipe.own == (("gds-prod", (("share", 4.0),)),)
    assert made.is_whole


def test_the_report_has_each_word_and_why(imported: Import) -> None:
    made, _ = imported(NEW)
    told = fates(made)
    assert {name for name, fate in told.items() if fate == "ignored"} == {
        "volume_group", "version_logger", "machinefeatures_option_rack", "frobnicate", "machine_model", "image_signing_dn",
        "machines_dir_days",
    }  # fmt: skip
    assert told["udp_timeout_seconds"] == "changed" and told["vac_space"] == "mapped"
    assert all(line.why for line in made.lines if line.fate is not Fate.MAPPED)
    words = {line.split("=")[0].strip() for line in NEW.splitlines() if "=" in line}
    assert words == set(told)


# Every word that any version of Vac looks for, 0.9 to 03.01, with a value of its sort.
NUMBERS = (
    "cpu_per_machine cpu_total cycle_seconds disk_gb_per_cpu disk_gb_per_processor hs06_per_cpu hs06_per_machine hs06_per_processor "
    "mb_per_cpu mb_per_machine mb_per_processor overload_per_cpu overload_per_processor processors_per_superslot scratch_gb "
    "total_machines total_processors udp_timeout_seconds vcpu_per_machine version_logger"
)
TEXTS = (
    "bridge_device delete_old_files description domain_type fix_networking forward_dev gocdb_cert_file gocdb_key_file "
    "gocdb_sitename nat_network network_type root_public_key singularity_user volume_group"
)
NUMBERS_OF_A_TYPE = (
    "backoff_seconds disk_gb_per_processor fizzle_seconds heartbeat_seconds machineoutputs_days machines_dir_days "
    "max_processors max_wallclock_seconds min_processors min_wallclock_seconds target_share"
)
TEXTS_OF_A_TYPE = (
    "cernvm_signing_dn container_command cvmfs_repositories epilog heartbeat_file image_signing_dn log_machineoutputs mac "
    "machinegroup prolog root_device root_public_key rootpublickey scratch_device scratch_volume shutdown_command tmp_binds "
    "user_data user_data_proxy_cert user_data_proxy_key"
)
FORGOTTEN = (
    "mb_per_machine hs06_per_machine total_machines user_data_proxy_cert user_data_proxy_key"  # by Vac 03.00, too
)
OF_SETTINGS = dict.fromkeys(NUMBERS.split(), "3") | dict.fromkeys(TEXTS.split(), "x") | {
    "draining": "yes", "factories": "a.example.org", "shutdown_time": "1800000000", "vac_space": "v.example.org",
    "vacmon_hostport": "mon.example.org:8884",
}  # fmt: skip
OF_TYPES = dict.fromkeys(NUMBERS_OF_A_TYPE.split(), "3") | dict.fromkeys(TEXTS_OF_A_TYPE.split(), "x") | {
    "accounting_fqan": "/x", "machine_model": "vm-raw", "vm_model": "vm-raw", "machinetype_path": "/x",
    "root_image": "http://a.example/x", "legacy_proxy": "true", "user_data_proxy": "true",
}  # fmt: skip


def test_no_word_of_any_version_is_unknown(imported: Import) -> None:
    lines = [f"{word} = {value}" for word, value in OF_SETTINGS.items()]
    lines += ["[machinetype a]", *(f"{word} = {value}" for word, value in OF_TYPES.items())]
    made, _ = imported("\n".join(["[settings]", *lines]))
    assert {line.option for line in made.lines} >= OF_SETTINGS.keys() | OF_TYPES.keys()
    assert not [line for line in made.lines if line.why == "no such word"]
    assert {line.option for line in made.lines if line.fate is Fate.REFUSED} == set(FORGOTTEN.split())


def test_of_a_file_of_the_first_years_what_was_for_a_whole_machine_is_refused_with_its_new_name(
    imported: Import,
) -> None:
    made, space = imported(OLD)
    assert (space.processors_per_superslot, space.cycle, space.disk) == (2, 90.0, 25 * 10**9)
    (one,) = space.types
    assert (one.name, one.share, one.max_wallclock) == ("example", 0.0, 3600.0)
    assert (one.image, one.user_data) == (
        "/var/lib/vac/images/cernvm.hdd",
        "/var/lib/vac/vmtypes/example/files/user_data",
    )
    told = fates(made)
    assert {told[name] for name in ("prolog", "epilog", "shutdown_command", "rootpublickey", "domain_type")} == {
        "ignored"
    }
    refused = {line.option or line.section: line.why for line in made.lines if line.fate is Fate.REFUSED}
    assert {name: why.rpartition(" ")[2] for name, why in refused.items() if name != "targetshares"} == {
        "mb_per_machine": "mb_per_processor", "hs06_per_machine": "hs06_per_processor", "total_machines": "total_processors",
        "factories": "[settings]",
    }  # fmt: skip
    assert "target_share" in refused["targetshares"] and not made.is_whole
    assert any("backoff_seconds is 600" in line.why for line in made.lines)


@pytest.mark.parametrize(
    ("option", "value", "field", "became"),
    [
        ("cpu_total", "8", "processors", 8), ("overload_per_cpu", "2", "overload", 2.0), ("mb_per_cpu", "3000", "memory", 3000 * MIB),
        ("hs06_per_cpu", "9.5", "hs06", 9.5), ("disk_gb_per_cpu", "20", "disk", 20 * 10**9), ("scratch_gb", "20", "disk", 20 * 10**9),
        ("vcpu_per_machine", "4", "processors_per_superslot", 4), ("cpu_per_machine", "4", "processors_per_superslot", 4),
    ],
)  # fmt: skip
def test_an_old_name_means_what_it_meant(imported: Import, option: str, value: str, field: str, became: object) -> None:
    _, space = imported(f"[settings]\nvac_space = v.example.org\n{option} = {value}\n")
    assert getattr(space, field) == became


def test_old_names_of_a_machinetype_too(imported: Import) -> None:
    made, space = imported(
        "[settings]\nvac_space = v.example.org\n[vmtype a]\nvm_model = vm-raw\nroot_image = http://a.example/x\n"
        "machineoutputs_days = 2\nroot_public_key = /x\nuser_data_proxy_cert = cert.pem\nuser_data_proxy_key = /etc/key.pem\n"
    )
    told = fates(made)
    assert told["machineoutputs_days"] == told["root_public_key"] == told["vm_model"] == "ignored"
    assert told["user_data_proxy_cert"] == told["user_data_proxy_key"] == "refused" and space.types[0].proxy == ()


def test_a_later_file_wins_and_sections_of_one_name_are_one(imported: Import) -> None:
    _, space = imported(
        "[settings]\nvac_space = v.example.org\ntotal_processors = 4\n[Machinetype  A]\nroot_image = http://a.example/1\n",
        "[settings]\ntotal_processors = 8\n[machinetype a]\ntarget_share = 1\n[machinetype a]\ntarget_share = 2\n",
    )
    assert (space.processors, space.types[0].share, space.types[0].image) == (8, 2.0, "http://a.example/1")


@pytest.mark.parametrize(
    ("text", "option", "why"),
    [
        ("[machinetype a]\nroot_image=http://a.example/x\nmachine_model = docker", "root_image", "container"),
        ("[machinetype a]\nroot_image=docker://x", "root_image", "container"),
        ("[machinetype a]\nroot_image=http://a.example/x\nmax_processors = some", "max_processors", "'some'"),
        ("[machinetype a]\nroot_image=http://a.example/x\nmax_processors = 0", "max_processors", "must be at least 1"),
        ("[machinetype a]\nroot_image=http://a.example/x\nheartbeat_file = a/b", "heartbeat_file", "no file's name"),
        ("[machinetype a]\nroot_image=http://a.example/x\nuser_data = ../x", "user_data", "no file's name"),
        ("[machinetype a]\ntarget_share = 1", "target_share", "image"),
        ("[machinetype a_b]\ntarget_share = 1", "", "no name of a machinetype"),
        ("[vacuum_pipe a]\ntarget_share = 1", "target_share", "url"),
        ("[settings]\nhs06_per_processor = fast", "hs06_per_processor", "'fast' is no number"),
        ("[settings]\ntotal_processors = -1", "total_processors", "no number"),
        ("[settings]\nvacmon_hostport = mon", "vacmon_hostport", "not HOST:PORT"),
        ("[settings]\nfactories = a/b", "factories", "cannot be a host's name"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_and_the_rest_still_loads(
    imported: Import, text: str, option: str, why: str
) -> None:
    good = "[settings]\nvac_space = v.example.org\n[machinetype good]\nroot_image = http://a.example/x\n"
    made, space = imported(good, text)
    refused = [line for line in made.lines if line.fate is Fate.REFUSED]
    assert any(line.option == option and why in line.why for line in refused), refused
    assert not made.is_whole
    assert "good" in {one.name for one in space.types}
    assert all(line.key == "" and line.raw is None for line in refused)


def test_what_is_no_file_of_vac_s_is_named(tmp_path: Path) -> None:
    file = tmp_path / "vac.conf"
    with pytest.raises(InputMissing, match="No such file"):
        read([file])
    for data in (b"no section\n", b"[settings]\nx\n", b"\xff\xfe", b"#" * (1 << 21)):
        file.write_bytes(data)
        with pytest.raises(InputMissing, match=str(file)):
            read([file])


def test_without_a_space_there_is_nothing_to_write(tmp_path: Path) -> None:
    file = tmp_path / "vac.conf"
    file.write_text("[machinetype a]\nroot_image = http://a.example/x\n")
    with pytest.raises(BadSettings, match=r"space\.name: is missing"):
        read([file])


def test_words_with_quotes_and_backslashes_stay_what_they_are(imported: Import) -> None:
    value = 'say "hello" \\ to # = [all] ä'
    _, space = imported(f"[settings]\nvac_space = v.example.org\nuser_data_option_a = {value}\n")
    assert dict(space.options) == {"a": value}
    assert json.dumps(value)
