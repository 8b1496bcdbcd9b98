"""One table of cases for the site's rules, whoever judges: Python on the node, Lua in slurmctld, the hook of OpenPBS's
server, the expressions of HTCondor's schedd.

The askers are users that a test host has (the Lua plugin and the hook ask it for groups): root in the group root, nobody
in nogroup.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from belljar.batch import Pull, Settings
from belljar.model import GIB, MIB

SMALL = {"max_cpus": 4, "max_memory": 2 * GIB, "max_disk": 10 * GIB}
HALF = {"overhead": 0, "overhead_percent": 50.0}


@dataclass(frozen=True)
class Case:
    """Who asks for what, under which rules, and the answer."""

    says: str  # words of the refusal; "" where the job is let in
    image: str = "debian12"
    user: str = "nobody"
    queue: str = "night"
    cpus: int = 1
    memory: int | None = None  # MiB
    disk: int | None = None  # MiB
    gpus: int = 0
    site: dict[str, Any] = field(default_factory=dict)
    runs_bare: bool = False  # let in, and in no machine
    on_the_node: bool = False  # an access point of HTCondor cannot know: it lets the job in

    @property
    def settings(self) -> Settings:
        return Settings(**self.site)

    @property
    def name(self) -> str:
        asked = {"image": self.image, "user": self.user, "queue": self.queue, "cpus": self.cpus}
        words = [f"{key}={value}" for key, value in asked.items() if value != getattr(Case, key)]
        sizes = [
            f"{key}={value}"
            for key, value in (("memory", self.memory), ("disk", self.disk), ("gpus", self.gpus or None))
            if value is not None
        ]
        return " ".join((*words, *sizes, *(f"{key}={value}" for key, value in self.site.items()))) or "nothing"


def allow(*rules: str) -> dict[str, Any]:
    return {"allow": rules}


NOT, NAME = "image debian12: not allowed for", "name of an image"
TOOL = "docker://hub.example.org/team/tool:1.2"
ANY, OURS = (
    {"pull": Pull.ANY},
    {"pull": Pull.SITE_REGISTRIES, "registries": ("hub.example.org/team", "localhost:5000/")},
)
NO_PULL, ONLY = "a job pulls images from no registry here", "a job pulls images only from hub.example.org/team"

CASES = [
    Case(""),
    # -- which image
    Case("", image="", runs_bare=True),
    Case("", image="", runs_bare=True, site={"queue_images": ("day=debian12",)}),
    Case("", image="", site={"queue_images": ("night=debian12",)}),
    Case("", image="", site={"default_image": "debian12"}),
    Case(NOT, image="", site={"default_image": "debian12", **allow("* el9")}, on_the_node=True),
    Case(NOT, image="", site={"queue_images": ("night=debian12",), **allow("* el9")}, on_the_node=True),
    Case("image alma9: not allowed for", image="alma9", site={"default_image": "debian12", **allow("* debian*")}),
    # -- names
    *(Case(NAME, image=image) for image in ("../x", "$(id)", "-x", ".x", "x" * 101, "a'b", "a`b")),
    Case("", image="x" * 40, site=allow("* x*")),
    # -- images of registries
    Case(NO_PULL, image=TOOL),
    Case(NO_PULL, image=TOOL, site={"registries": ("hub.example.org",)}),
    Case(NO_PULL, image=TOOL, site={"pull": Pull.SITE_REGISTRIES}),
    *(Case("", image=it, site=ANY) for it in (TOOL, "docker://alpine", f"docker://h/n@sha256:{'0' * 64}")),
    *(Case(NAME, image=it, site=ANY) for it in (
        "docker://", "docker:///x", "docker://h/$(id)", "docker://h/x'", "http://h/x", f"docker://h/{'x' * 200}", "oci:x", "/x")),
    *(Case("", image=f"docker://{it}", site=OURS) for it in ("hub.example.org/team/tool", "localhost:5000/x")),
    *(Case(ONLY, image=f"docker://{it}", site=OURS) for it in (
        "hub.example.org/tool", "hub.example.org/teams/x", "hubXexample.org/team/x", "localhost:50001/x", "localhost/x")),
    Case("not allowed for", image=TOOL, site={**ANY, **allow("* d*", "* docker*", "user:root *")}),
    Case("", image=TOOL, site={**ANY, **allow("* d*", "user:nobody *")}),
    # -- who
    Case(NOT, site=allow()),
    Case("", site=allow("*\tdebian*")),
    Case("", site=allow("  user:nobody   debian12 ")),
    Case(NOT, site=allow("user:root *")),
    Case("", user="root", site=allow("user:root *")),
    Case(NOT, site=allow("user:Nobody *", "user:nobod *", "user:* *")),
    Case("", site=allow("group:nogroup *")),
    Case("", user="root", site=allow("group:root debian12")),
    Case(NOT, site=allow("group:root *"), on_the_node=True),
    Case(NOT, site=allow("group:nogroup el9")),
    Case(NOT, site=allow("group:root el9", "user:root *")),
    Case("", site=allow("queue:night *")),
    Case(NOT, site=allow("queue:day *", "queue:Night *")),
    Case("", site=allow("* el9", "queue:night debian12")),
    # -- patterns
    *(Case("", site=allow(f"* {one}")) for one in ("*", "debian12", "debian??", "d*1*2", "**", "?ebian12", "debian12*")),
    *(Case(NOT, site=allow(f"* {one}")) for one in ("debian", "ebian12", "Debian12", "debian?", "debian12?", "debian.*")),
    Case("", image="a.b-c_d", site=allow("* a.b-c_d")),
    Case("image aXb-c: not allowed", image="aXb-c", site=allow("* a.b-c")),
    Case("image aXb: not allowed", image="aXb", site=allow("* a-b")),
    # -- sizes
    *(Case(say, cpus=cpus, site=SMALL) for cpus, say in ((4, ""), (5, "5 cpus: a job in a machine may have at most 4 here"))),
    Case("", memory=2048, site=SMALL),
    Case("2049 MiB of memory: a job in a machine may have at most 2048 here", memory=2049, site=SMALL),
    Case("", disk=10240, site=SMALL),
    Case("10241 MiB of disk: a job in a machine may have at most 10240 here", disk=10241, site=SMALL),
    Case("", cpus=4, image="", memory=1 << 20, runs_bare=True, site={**SMALL, "max_cpus": 1}),
    Case("479 MiB of memory: a job in a machine needs at least 480 MiB", memory=479),
    Case("", memory=480),
    Case("511 MiB of memory: a job in a machine needs at least 512 MiB", memory=511, site=HALF),
    Case("", memory=512, site=HALF),
    Case("365 MiB of memory: a job in a machine needs at least 366 MiB", memory=365, site={**HALF, "overhead_percent": 30.0}),
    Case("", memory=366, site={**HALF, "overhead_percent": 30.0}),
    Case("480 MiB of memory: a job in a machine needs at least 481 MiB", memory=480, site={"overhead": 224 * MIB + 1}),
    # -- what a machine does not have
    Case("a machine has no GPU", gpus=1),
    Case("a machine has no GPU", gpus=10, image="", site={"default_image": "debian12"}),
    Case("", gpus=1, image="", runs_bare=True),
    Case("", gpus=1, site={"gpus": True}),
    Case("", cpus=1 << 16, memory=1 << 22, disk=1 << 24),
]  # fmt: skip
