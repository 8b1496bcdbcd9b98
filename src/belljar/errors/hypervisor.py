"""The hypervisor did not do its part."""

from __future__ import annotations

from belljar.errors.base import BelljarError, Retry
from belljar.model import Cause


class HypervisorError(BelljarError):
    """QEMU did not do its part."""

    hint = "`belljar logs ID --qemu` shows what QEMU said."
    cause = Cause.BOOT_FAILED


class DomainDied(HypervisorError):
    """QEMU ended before it was asked to."""


class DomainKilled(HypervisorError):
    """Somebody outside killed QEMU: the host's OOM killer, a limit, an administrator."""

    hint = "See the host's kernel log; QEMU needs the guest's memory and some 200 MiB more."
    retry = Retry.ELSEWHERE
    cause = Cause.HOST_OOM


class QmpError(HypervisorError):
    """QEMU refused a command."""


class PlugRefused(HypervisorError):
    """A clone could not be given the processors or the memory that its template does not have."""

    hint = "Ask for another size; `belljar template build --exact` makes a template of exactly this one."


class QmpTimeout(HypervisorError):
    """QEMU did not answer in time."""

    hint = "The host may be overloaded; see `belljar logs ID --qemu`."
    cause = Cause.NODE_FAULT


class LibvirtRefused(HypervisorError):
    """libvirt answered, and refused what it was asked for."""

    hint = "See libvirt's own log; `belljar doctor` tries a connection."


class TemplateError(HypervisorError):
    """A template could not be made or used; the machine is booted cold instead."""

    hint = "`belljar template list` shows the templates; `belljar template remove KEY` drops one."
