"""The image cannot be used."""

from __future__ import annotations

from belljar.errors.base import BelljarError, Retry
from belljar.model import Cause


class ImageError(BelljarError):
    """The image cannot be used."""

    hint = "`belljar image list` shows the images that can be used."
    cause = Cause.IMAGE_FAULT


class ImageUnknown(ImageError):
    """No image has this name or digest."""

    hint = "`belljar image list` shows the names; `belljar image build` or `belljar image import` makes one."
    retry = Retry.NEVER


class ImageInUse(ImageError):
    """An image that a machine or a template runs on cannot be removed."""

    hint = "Wait until its machines ended (`belljar ps`) and remove its templates (`belljar template list`)."


class ImageMismatch(ImageError):
    """The bytes that arrived are not the image that was ordered."""

    hint = "Correct the digest, or ask the image's publisher."
    retry = Retry.NEVER


class ImageCorrupt(ImageError):
    """The image in the store is not what it was when it was stored."""

    hint = "`belljar image repair NAME` brings it again from where it came."
    retry = Retry.ELSEWHERE


class ImageUnfit(ImageError):
    """The disk does not have what it is to be started by."""

    hint = "Leave `--firmware` at auto, or give a kernel (`--kernel`, `--initrd`)."


class ImageTooLarge(ImageError):
    """The download or the unpacked image is larger than the settings allow."""

    hint = "Raise `image.max_size` in the settings."
    retry = Retry.NEVER


class DownloadFailed(ImageError):
    """The image's source refused or broke off."""

    hint = "Check the address, then try again: a broken download is resumed."


class DownloadStalled(DownloadFailed):
    """No bytes arrived for longer than `image.stall_timeout`."""

    hint = "Try again: the download goes on where it stopped."


class NotAnIndex(ImageError):
    """What a source of images offers is no index that belljar has written."""

    hint = "Check `image.sources`: the folder that `belljar image publish` writes, or its address on a web server."
    retry = Retry.LATER


class IndexStale(ImageError):
    """A source's index has expired, or is older than one this host has seen of it already."""

    hint = (
        "Ask whoever publishes there: `belljar image publish --to DIR` renews an index. If the store was made anew on purpose:"
        " `belljar image sync --forget`."
    )
    retry = Retry.LATER


class SignatureRefused(ImageError):
    """An image or an index is not signed, not signed by one who may publish that name, or not what was signed."""

    hint = "`image.trust` in the settings says who may publish which names; see docs/image-life.md."
    retry = Retry.NEVER


class WorkshopFailed(ImageError):
    """The machine in which belljar works on disks that nobody trusts could not do what was asked."""

    hint = "Check that the image has a file system belljar's default image knows, and that the paths are there."


class BuildFailed(ImageError):
    """The image could not be built."""

    hint = "The last lines of the build's log are above; the whole log's path is in the message."
