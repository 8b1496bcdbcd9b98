"""lease.toml: every mistake at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from belljar.errors import BadSetting
from belljar.lease.service.start import types
from belljar.lease.settings import load

PAGE = Path(__file__).parents[3] / "docs/operate/lease/site.md"


def test_the_pages_file_is_read(tmp_path: Path) -> None:
    (found,) = re.findall(r"<<END\n(.*?)^END$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "lease.toml").write_text(found)
    settings, (policy,) = load(tmp_path / "lease.toml")
    assert (policy.name, policy.users, policy.time) == ("all", ("*",), 86400.0)
    assert types(settings)["large"].cpus == 4


def test_mistakes_are_told_together(tmp_path: Path) -> None:
    (tmp_path / "lease.toml").write_text('[lease]\nsystm = "slurm"\nport = 0\n[policy.x]\nmachine = 3\n[leases]\n')
    with pytest.raises(BadSetting) as error:
        load(tmp_path / "lease.toml")
    told = error.value.message
    assert all(one in told for one in ("systm", "port", "machine", "leases"))


def test_what_a_service_cannot_do_without_is_named(tmp_path: Path) -> None:
    (tmp_path / "lease.toml").write_text('[lease]\nsystem = "nqs"\n')
    with pytest.raises(BadSetting) as error:
        load(tmp_path / "lease.toml")
    told = error.value.message
    for one in ("nqs", "lease.address", "lease.images", "no policy"):
        assert one in told


def test_an_address_that_no_certificate_can_have_is_named(tmp_path: Path) -> None:
    facts = '[lease]\naddress = "rechner-ö"\nimages = ["debian12"]\n[policy.all]\nusers = ["*"]\n'
    (tmp_path / "lease.toml").write_text(facts)
    with pytest.raises(BadSetting) as error:
        load(tmp_path / "lease.toml")
    assert "lease.toml:2, lease.address: is missing, or not in ASCII" in error.value.message.splitlines()[0]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('types = { small = "1/2G" }', "lease.toml:2, lease.types: '1/2G' is not a size"),
        ('types = { small = "1/2G/10G/3" }', "lease.toml:2, lease.types: '1/2G/10G/3' is not a size"),
        ('types = { small = "x/2G/10G" }', "lease.toml:2, lease.types: 'x/2G/10G' is not a size"),
        ('types = { small = "0/2G/10G" }', "lease.toml:2, lease.types: '0/2G/10G' is not a size"),
        ('types = { small = "" }', "lease.toml:2, lease.types: a type has no size"),
        ("types = {}", "lease.toml:2, lease.types: a type has no size"),
        ("silence = 20", "lease.toml:2, lease.silence: is 20 s, and a pilot is heard of every 20 s"),
        ("lost = 5", "lease.toml:2, lease.lost: is 5 s, and a pilot is heard of every 20 s"),
        ("port = 99999", "lease.toml:2, lease.port: must be at most 65535, not 99999"),
        ('system = "lsf"', "lease.toml:2, lease.system: lsf: it cannot run pilots yet (Known are gridengine, openpbs, slurm, torque.)"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_named_with_its_line_and_what_it_could_be(
    line: str, told: str, tmp_path: Path
) -> None:
    text = f'[lease]\n{line}\naddress = "head"\nimages = ["debian12"]\n[policy.all]\nusers = ["*"]\n'
    (tmp_path / "lease.toml").write_text(text)
    with pytest.raises(BadSetting) as error:
        load(tmp_path / "lease.toml")
    (mistake,) = error.value.message.splitlines()
    assert told in mistake and ("types" not in line or '1/2G/10G"' in mistake), mistake


def test_networks_that_are_none_are_named(tmp_path: Path) -> None:
    (tmp_path / "lease.toml").write_text(
        '[lease]\nprivate_net = "10.0.0.0/30"\nprivate_ports = "9-8"\nnetworks = { own = "private", ours = "isolated:all", far = "vxlan" }\n'
    )
    with pytest.raises(BadSetting) as error:
        load(tmp_path / "lease.toml")
    keys = ("lease.private_net:", "lease.private_ports:", "lease.networks:")
    told = [line for line in error.value.message.splitlines() if any(key in line for key in keys)]
    assert (
        len(told) == 4
        and "9-8" in told[3]
        and "isolated:all" in told[0]
        and "vxlan" in told[1]
        and "254 machines" in told[2]
    )
