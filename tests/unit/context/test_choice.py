"""Which way a guest is contextualized: the whole decision, as a table."""

from dataclasses import replace

import pytest

from belljar.context import Means, choose
from belljar.errors import UsageError
from belljar.model import Context

AUTO, RAMDISK, CLOUD_INIT, INJECT, NONE = Context
STOCK = Means(ramdisk=True, init="systemd", cloud_init=True)
NOTHING = Means()


@pytest.mark.parametrize(
    ("means", "context"),
    [
        (STOCK, RAMDISK),
        (replace(STOCK, own=INJECT), INJECT),
        (replace(STOCK, own=NONE), NONE),
        (replace(STOCK, ramdisk=False), CLOUD_INIT),
        (replace(STOCK, ramdisk=False, agent=True), NONE),
        (replace(STOCK, agent=True), RAMDISK),
        (replace(STOCK, ramdisk=False, cloud_init=False), INJECT),
        (replace(STOCK, ramdisk=False, init="other"), NONE),
        (Means(ramdisk=True), RAMDISK),
        (NOTHING, NONE),
    ],
)
def test_auto_takes_what_the_importer_said_and_else_the_first_way_that_can_be_gone(
    means: Means, context: Context
) -> None:
    chosen = choose(AUTO, means, "some")
    assert chosen.context is context
    assert chosen.reason


@pytest.mark.parametrize("wanted", [RAMDISK, CLOUD_INIT, INJECT, NONE])
def test_what_is_asked_for_goes_before_what_the_importer_said(wanted: Context) -> None:
    assert choose(wanted, replace(STOCK, own=NONE), "some").context is wanted
    assert choose(wanted, STOCK, "some").reason == "asked for"


@pytest.mark.parametrize(
    ("wanted", "means", "missing"),
    [
        (RAMDISK, NOTHING, ["kernel that belljar can start directly"]),
        (CLOUD_INIT, replace(STOCK, cloud_init=False), ["cloud-init"]),
        (CLOUD_INIT, replace(STOCK, init="other"), ["systemd"]),
        (CLOUD_INIT, NOTHING, ["cloud-init", "systemd"]),
        (INJECT, replace(STOCK, init=""), ["systemd"]),
    ],
)
def test_what_the_image_cannot_do_is_refused_with_what_is_missing(
    wanted: Context, means: Means, missing: list[str]
) -> None:
    with pytest.raises(UsageError) as refused:
        choose(wanted, means, "site")
    assert "image site" in refused.value.message and wanted.value in refused.value.message
    assert f"no {' and no '.join(missing)} was found" in refused.value.message


def test_an_importers_wish_that_cannot_be_had_is_refused_and_not_replaced() -> None:
    with pytest.raises(UsageError, match="the image was imported so"):
        choose(AUTO, replace(STOCK, own=INJECT, init="other"), "site")


@pytest.mark.parametrize(
    ("wanted", "means"),
    [
        (RAMDISK, Means(ramdisk=True)),
        (CLOUD_INIT, Means(init="systemd", cloud_init=True)),
        (INJECT, Means(init="systemd")),
    ],
)
def test_no_way_needs_a_python_of_the_image(wanted: Context, means: Means) -> None:
    """Each brings one along."""
    assert choose(wanted, means, "old").context is wanted


@pytest.mark.parametrize("wanted", [CLOUD_INIT, INJECT, NONE])
def test_an_image_that_was_not_looked_into_is_believed_to_whoever_insists(wanted: Context) -> None:
    unknown = Means(is_known=False)
    assert choose(wanted, unknown, "xfs").context is wanted
    assert choose(AUTO, unknown, "xfs").context is NONE
    with pytest.raises(UsageError, match="kernel that belljar can start directly"):
        choose(RAMDISK, unknown, "xfs")
