"""Ansible and Terraform as their users call them, against the front end over loopback: what is applied twice is there once.

Ansible comes from PyPI into an environment of its own. What both ask for is asked with boto3 in test_actions.py, in every run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.lease.ec2.clients import served
from tests.unit.lease.ec2.house import IMAGE, KEY, SITE_KEY, House

from belljar.lease.ec2.keyring import secret_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
PLAY = """
- hosts: localhost
  gather_facts: false
  connection: local
  module_defaults:
    group/aws: {{region: lab, endpoint_url: "{url}"}}
  tasks:
    - amazon.aws.ec2_instance: {task}
      register: made
    - copy: {{content: "{{{{ made | to_json }}}}", dest: "{out}"}}
"""
PLAIN = {
    "name": "web", "image_id": IMAGE, "instance_type": "m1.small", "security_group": "default", "state": "running", "wait": True,
    "tags": {"role": "web", "lease:duration": "PT2H"},
}  # fmt: skip
FULL = {
    **PLAIN, "name": "two", "exact_count": 2, "user_data": "#!/bin/sh\ntrue\n", "termination_protection": False,
    "metadata_options": {"http_tokens": "required", "http_endpoint": "enabled"},
    "volumes": [{"device_name": "/dev/sda1", "ebs": {"volume_size": 20, "delete_on_termination": True}}],
}  # fmt: skip
CONFIGURATION = """
terraform {{
  required_providers {{
    aws = {{
      source = "hashicorp/aws"
    }}
  }}
}}
provider "aws" {{
  region                      = "lab"
  skip_credentials_validation = true
  skip_requesting_account_id  = true
  skip_region_validation      = true
  skip_metadata_api_check     = true
  endpoints {{
    ec2 = "{url}"
  }}
  ignore_tags {{
    keys = ["lease:state", "lease:lrm-job", "lease:node", "lease:estimated-start", "lease:ends-at"]
  }}
}}
data "aws_vpc" "default" {{
  default = true
}}
data "aws_subnets" "default" {{
  filter {{
    name   = "vpc-id"
    values = [data.aws_vpc.default.id]
  }}
}}
data "aws_security_group" "default" {{
  name   = "default"
  vpc_id = data.aws_vpc.default.id
}}
data "aws_ami" "debian" {{
  owners = ["belljar"]
  filter {{
    name   = "name"
    values = ["debian-12"]
  }}
}}
resource "aws_instance" "web" {{
  ami                    = data.aws_ami.debian.id
  instance_type          = "m1.small"
  subnet_id              = data.aws_subnets.default.ids[0]
  vpc_security_group_ids = [data.aws_security_group.default.id]
  user_data              = "#!/bin/sh\\ntrue\\n"
  metadata_options {{
    http_tokens                 = "required"
    http_put_response_hop_limit = 2
  }}
  tags = {{
    Name             = "web"
    "lease:duration" = "PT2H"
  }}
}}
"""


class Site:
    def __init__(self, port: int, house: House, folder: Path) -> None:
        self.url, self.house, self.folder = f"http://127.0.0.1:{port}", house, folder
        self.env = {
            **os.environ, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": secret_of(SITE_KEY, KEY), "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null", "CHECKPOINT_DISABLE": "1",
        }  # fmt: skip

    @property
    def live(self) -> int:
        return sum(one.is_live for one in self.house.machines)

    def run(self, *words: str | Path, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            words, cwd=self.folder, env=self.env | env, capture_output=True, text=True, timeout=600, check=False
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Machines run, and have ended, as soon as anything is asked after that."""
    house = House(tmp_path / "lease")
    answer = house.front.answer

    def at_once(sent: Any) -> Any:
        house.boot()
        house.end()
        return answer(sent)

    monkeypatch.setattr(house.front, "answer", at_once)
    (tmp_path / "work").mkdir()
    with served(house.front) as port:
        yield Site(port, house, tmp_path / "work")
    house.store.close()


@pytest.fixture(scope="module")
def ansible(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Ansible's programs; its collection of AWS is in `collections` beside that."""
    folder = tmp_path_factory.mktemp("ansible")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=300)
    pip = (folder / "venv/bin/pip", "-q")
    subprocess.run([*pip, "install", "ansible-core", "boto3"], check=True, timeout=600)
    subprocess.run([*pip, "download", "--no-deps", "ansible", "--dest", folder], check=True, timeout=600)
    (wheel,) = folder.glob("ansible-*.whl")
    with zipfile.ZipFile(wheel) as file:
        ours = [name for name in file.namelist() if name.startswith("ansible_collections/amazon/aws/")]
        file.extractall(folder / "collections", ours)
    return folder / "venv/bin"


@pytest.mark.parametrize(("task", "count"), [(PLAIN, 1), (FULL, 2)], ids=["plain", "full"])
def test_an_ansible_task_that_runs_twice_launches_once(
    site: Site, ansible: Path, task: dict[str, Any], count: int
) -> None:
    def play(asked: dict[str, Any]) -> dict[str, Any]:
        out = site.folder / "out.json"
        (site.folder / "play.yml").write_text(PLAY.format(url=site.url, task=json.dumps(asked), out=out))
        more = {
            "ANSIBLE_COLLECTIONS_PATH": str(ansible.parents[1] / "collections"), "HOME": str(site.folder),
            "ANSIBLE_PYTHON_INTERPRETER": str(ansible / "python"),
        }  # fmt: skip
        site.run(ansible / "ansible-playbook", "-i", "localhost,", "play.yml", **more)
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    made, again = play(task), play(task)
    assert (made["changed"], again["changed"]) == (True, False)
    assert sorted(made["instance_ids"]) == sorted(again["instance_ids"]) and site.live == count
    assert {one.seconds for one in site.house.wanted} == {7200}
    assert play({"instance_ids": made["instance_ids"], "state": "absent", "wait": True})["changed"]
    assert site.live == 0


def test_terraform_applies_once_and_then_sees_no_change(site: Site) -> None:
    if shutil.which("terraform") is None:
        pytest.skip("there is no terraform on this host")
    (site.folder / "main.tf").write_text(CONFIGURATION.format(url=site.url))
    if site.run("terraform", "init", "-no-color", check=False).returncode:
        pytest.skip("terraform has no provider for AWS on this host")
    site.run("terraform", "apply", "-auto-approve", "-no-color")
    assert site.live == 1 and {one.seconds for one in site.house.wanted} == {7200}
    plan = site.run("terraform", "plan", "-detailed-exitcode", "-no-color", check=False)
    assert plan.returncode == 0, plan.stdout  # 2: there are changes
    site.run("terraform", "destroy", "-auto-approve", "-no-color")
    assert site.live == 0
