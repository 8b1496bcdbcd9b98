"""A front end in this process, and boto3's clients of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.lease.ec2.clients import wired
from tests.unit.lease.ec2.house import KEY, OTHER_KEY, House

RUN = {"ImageId": "debian-12", "MinCount": 1, "MaxCount": 1}


class Site:
    """A house and its clients, which are made once: boto3 takes half a second for one."""

    def __init__(self) -> None:
        self.house: House
        self.clients = {key: wired(self, key) for key in (KEY, OTHER_KEY)}  # type: ignore[arg-type]

    def answer(self, *given: Any) -> Any:
        return self.house.front.answer(*given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.clients[KEY], name)

    def refused(self, name: str, *, key: str = KEY, **asked: Any) -> str:
        client = self.clients[key]
        with pytest.raises(client.exceptions.ClientError) as caught:
            getattr(client, name)(**asked)
        return str(caught.value.response["Error"]["Code"])

    def launch(self, count: int = 1, **more: Any) -> list[str]:
        made = self.run_instances(**{**RUN, "MaxCount": count, "MinCount": count, **more})
        return [one["InstanceId"] for one in made["Instances"]]

    def listed(self, **asked: Any) -> list[dict[str, Any]]:
        return [one for group in self.describe_instances(**asked)["Reservations"] for one in group["Instances"]]

    def found(self, **filters: str | list[str]) -> list[str]:
        given = [
            {"Name": name.replace("_", "-").replace("--", ":"), "Values": [value] if isinstance(value, str) else value}
            for name, value in filters.items()
        ]
        return [one["InstanceId"] for one in self.listed(Filters=given)]


MADE: list[Site] = []


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    if not MADE:
        MADE.append(Site())
    MADE[0].house = House(tmp_path / "lease")
    yield MADE[0]
    MADE[0].house.store.close()
