"""What a site gets for LSF."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from belljar.batch import Settings, load
from belljar.batch.install.pieces import Advice, OurFile, OurLines, Place
from belljar.batch.lsf.dialect import STARTER
from belljar.batch.lsf.site import SITE
from belljar.errors import BadOption, CommandMissing


def place(
    folder: Path, settings: Settings | None = None, options: Mapping[str, str] | None = None, said: bytes = b""
) -> Place:
    def run(argv: tuple[str, ...]) -> bytes:
        if not said:
            raise CommandMissing(f"{argv[0]}: no such program on this host")
        return said

    return Place(
        settings=settings or Settings(), wrapper=folder / "libexec/wrap-lsf", belljar=folder / "libexec/belljar",
        store=folder / "store", folder=folder / "configdir", options=options or {}, run=run,
    )  # fmt: skip


def profile(at: Place) -> tuple[str, ...]:
    return next(one.lines for one in SITE.pieces(at) if isinstance(one, OurLines))


def test_a_profile_with_our_starter_and_hooks(tmp_path: Path) -> None:
    assert load("lsf").site is SITE
    lines = profile(place(tmp_path))
    assert lines[0] == "Begin Application" and lines[-1] == "End Application"
    assert f"JOB_STARTER = exec {tmp_path}/libexec/wrap-lsf; %USRCMD" in lines
    assert f"POST_EXEC = {tmp_path}/libexec/lsf-epilog" in lines


@pytest.mark.parametrize("unit", ["", "GB"])
def test_the_starter_is_one_that_the_job_finds_in_its_file(tmp_path: Path, unit: str) -> None:
    lines = profile(place(tmp_path, options={"unit": unit}))
    starter = next(line for line in lines if line.startswith("JOB_STARTER")).partition(" = ")[2]
    written = starter.replace("%USRCMD", "echo a; echo b").encode()
    match = STARTER.match(written)
    assert match is not None and written[match.end() :] == b"echo a; echo b"


def test_a_warning_does_not_keep_lsf_from_reading_again(tmp_path: Path) -> None:
    """`badmin reconfig` asks at any warning, and takes no answer for no."""
    assert SITE.after(place(tmp_path)) == (("badmin", "reconfig", "-f"),)


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="unit"):
        list(SITE.pieces(place(tmp_path, options={"unit": "GB; id"})))
    with pytest.raises(BadOption, match="split"):
        list(SITE.pieces(place(tmp_path / "with blank")))


def test_the_esub_goes_where_bsub_looks_or_somebody_is_told(tmp_path: Path) -> None:
    def esub(at: Place) -> Path:
        return next(one.path for one in SITE.pieces(at) if isinstance(one, OurFile) and one.path.name == "esub.vm")

    def advice(at: Place) -> list[str]:
        return [one.purpose for one in SITE.pieces(at) if isinstance(one, Advice)]

    known = place(tmp_path, options={"serverdir": str(tmp_path / "etc")})
    assert esub(known) == tmp_path / "etc/esub.vm" and "bsub finds esub.vm" not in advice(known)
    assert esub(place(tmp_path)).parent.name == "libexec" and "bsub finds esub.vm" in advice(place(tmp_path))


def test_a_queue_that_is_an_environment_gets_advice(tmp_path: Path) -> None:
    settings = replace(Settings(), queue_images=("night=sl7",))
    text = next(
        one.text
        for one in SITE.pieces(place(tmp_path, settings))
        if isinstance(one, Advice) and "queues" in one.purpose
    )
    assert "for night:" in text and "JOB_STARTER = exec " in text


@pytest.mark.parametrize(
    ("code", "abort", "expected"), [(0, "97", 0), (97, "97", 97), (1, "97", 0), (125, "97", 0), (120, "120", 120)]
)
def test_only_a_refusal_stops_a_submission(tmp_path: Path, code: int, abort: str, expected: int) -> None:
    belljar = tmp_path / "libexec/belljar"
    belljar.parent.mkdir()
    belljar.write_text(f'#!/bin/sh\necho "$@"\nexit {code}\n')
    belljar.chmod(0o755)
    script = tmp_path / "esub"
    script.write_bytes(
        next(
            one.content for one in SITE.pieces(place(tmp_path)) if isinstance(one, OurFile) and "esub" in one.path.name
        )
    )
    env = {"PATH": "/usr/bin:/bin", "LSB_SUB_ABORT_VALUE": abort}
    done = subprocess.run(["sh", script, "image=a b"], env=env, capture_output=True, check=False, timeout=20)
    assert (done.returncode, done.stdout) == (expected, b"internal hook lsf esub image=a b\n")


def test_hooks_never_fail_a_job(tmp_path: Path) -> None:
    for one in SITE.pieces(place(tmp_path)):
        if isinstance(one, OurFile) and one.path.name.startswith("lsf-"):
            script = tmp_path / one.path.name
            script.write_bytes(one.content)
            assert subprocess.run(["sh", script], check=False, timeout=20, stderr=subprocess.DEVNULL).returncode == 0


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    assert [one.is_good for one in SITE.findings(place(tmp_path))] == [False]
    wrapped = f"JOB_STARTER:  exec {tmp_path}/libexec/wrap-lsf; %USRCMD\n".encode()
    assert [one.is_good for one in SITE.findings(place(tmp_path, said=wrapped))] == [True, True]
    assert [one.is_good for one in SITE.findings(place(tmp_path, said=b"JOB_STARTER: other\n"))] == [True, False]
