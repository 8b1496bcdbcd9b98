"""`belljar template`: what people see of templates, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.hypervisor import FakeHypervisor

from belljar import config
from belljar.cli import parser_of
from belljar.errors import TemplateError
from belljar.hypervisor import Accelerator, Boot, DomainSpec, Template
from belljar.image import Image
from belljar.model import MIB, MachineSpec, NetworkMode, Request

SPEC = DomainSpec(
    id="0123456789ab", cpus=1, memory=64 * MIB, image_digest="d" * 64, boot=Boot(digest="b" * 64), disk=Path("disk"),
    disk_size=64 * MIB, accelerator=Accelerator.TCG, folder=Path("folder"),
)  # fmt: skip
IMAGE = Image("d" * 64, ("debian12",), Path("disk"), 64 * MIB, None, None, "", "build", 0.0)


class PaperStore:
    def images(self) -> list[Image]:
        return [IMAGE]

    def ensure(self, reference: str) -> None:
        """It is there."""


@dataclass
class PaperRuntime:
    """What the verb uses of a Runtime."""

    hypervisor: FakeHypervisor
    images: PaperStore = field(default_factory=PaperStore)
    asked: list[MachineSpec] = field(default_factory=list)
    exact: list[bool] = field(default_factory=list)

    @property
    def settings(self) -> config.Settings:
        nowhere = Path("/nowhere")
        return config.Settings(config.Paths(nowhere, nowhere, None, nowhere, nowhere))

    def supervisor(self) -> PaperRuntime:
        return self

    async def make_template(self, request: Request, *, exact: bool, streams: None = None) -> Template:
        self.asked.append(request.machine)
        self.exact.append(exact)
        return await made(self.hypervisor, SPEC)


def make(hypervisor: FakeHypervisor, **changes: Any) -> Template:
    return asyncio.run(made(hypervisor, replace(SPEC, **changes)))


async def made(hypervisor: FakeHypervisor, spec: DomainSpec) -> Template:
    await hypervisor.prepare_template(spec, Path("base"))
    domain = hypervisor.start_template(spec)
    try:
        return await hypervisor.save_template(spec, domain)
    finally:
        domain.channel.close()
        domain.console.close()


@pytest.fixture
def runtime(tmp_path: Path) -> PaperRuntime:
    return PaperRuntime(FakeHypervisor(tmp_path / "templates"))


Call = Callable[..., int]


@pytest.fixture
def call(runtime: PaperRuntime) -> Call:
    def do(*words: str) -> int:
        args = parser_of("template").parse_args(words)
        return int(args.carry_out(args, runtime))

    return do


def test_the_list_names_image_size_and_age(
    runtime: PaperRuntime, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    template = make(runtime.hypervisor)
    assert call("list") == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["KEY", "IMAGE"]
    assert row.split()[:2] == [template.key, "debian12"]
    assert "64 MiB" in row
    assert call("list", "--format", "json") == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["key"], told["images"]) == (template.key, ["debian12"])


def test_an_empty_list_is_no_error(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("list", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_beginning_that_fits_none_or_several_is_refused(runtime: PaperRuntime, call: Call) -> None:
    with pytest.raises(TemplateError, match="no template"):
        call("verify", "abc")
    digits = [make(runtime.hypervisor, cpus=number).key[0] for number in range(1, 18)]  # one more than there are digits
    with pytest.raises(TemplateError, match=r"[0-9] templates of this user's have a key that begins so"):
        call("verify", max(digits, key=digits.count))


def test_verify_exits_one_when_something_is_wrong_and_says_what(
    runtime: PaperRuntime, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = make(runtime.hypervisor), make(runtime.hypervisor, cpus=2)
    assert call("verify") == 0
    runtime.hypervisor.damaged[bad.key] = "ram has other content than when it was made"
    capsys.readouterr()
    assert call("verify") == 1
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "other content" in lines[bad.key] and "whole" in lines[good.key]
    assert call("verify", good.key) == 0


def test_remove_wants_to_be_told_which(runtime: PaperRuntime, call: Call) -> None:
    one, two, three = (make(runtime.hypervisor, cpus=number) for number in (1, 2, 3))
    for words in ((), (one.key, "--all")):
        with pytest.raises(TemplateError, match="which templates"):
            call("remove", *words)
    assert call("remove", one.key) == 0
    assert {left.key for left in runtime.hypervisor.templates()} == {two.key, three.key}
    assert call("remove", "--all") == 0
    assert runtime.hypervisor.templates() == []


def test_an_empty_key_names_no_template(runtime: PaperRuntime, call: Call) -> None:
    """`belljar template remove "$key"` with the variable unset removed the only one there was."""
    only = make(runtime.hypervisor)
    for act in ("remove", "verify"):
        with pytest.raises(TemplateError, match=r"'': no template of this user's has a key that begins so"):
            call(act, "")
    assert runtime.hypervisor.templates() == [only]


def test_build_asks_for_the_machine_that_was_described(
    runtime: PaperRuntime, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("build", "--image", "other", "--cpus", "2", "--memory", "2G", "--network", "user", "--shares", "2") == 0
    (spec,) = runtime.asked
    assert runtime.exact == [False] and call("build", "--exact") == 0 and runtime.exact == [False, True]
    assert (spec.image, spec.cpus, spec.memory, spec.network, len(spec.shares)) == (
        "other",
        2,
        2 << 30,
        NetworkMode.USER,
        2,
    )
    assert runtime.hypervisor.templates()[0].key in capsys.readouterr().out


def test_build_without_words_asks_for_what_a_job_without_words_gets(runtime: PaperRuntime, call: Call) -> None:
    call("build")
    defaults = runtime.settings
    assert (runtime.asked[0].image, runtime.asked[0].memory) == (defaults.image.default, defaults.machine.memory)
