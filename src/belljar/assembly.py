"""Builds the object graph from the settings; the only place that knows every concrete class. Each part is made when it
is first asked for, so that a verb pays only for what it uses."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path

from belljar import config
from belljar.hints import TYPE_CHECKING
from belljar.hypervisor import Hypervisor, load
from belljar.machine import Folders
from belljar.network import Networks

if TYPE_CHECKING:
    import socket

    from belljar.guest.conversation import Conversation
    from belljar.host.devices.pci import Site
    from belljar.image.images import Images
    from belljar.image.store.qcow2 import Overlays
    from belljar.machine.cleaning.reaper import Reaper
    from belljar.machine.outside.registry import Machines
    from belljar.machine.supervisor import Supervisor
    from belljar.machine.workshop.workshop import Workshop


class Runtime:
    """All parts of belljar for one set of settings."""

    def __init__(self, config_file: str | None = None, *, verbose: bool = False, commands: str | None = None) -> None:
        self.config_file = Path(config_file) if config_file is not None else None
        self.commands = Path(commands) if commands is not None else None  # of the batch system whose launcher this is
        self.verbose = verbose
        self.is_lenient = (
            False  # go by what can be understood of the settings: a hook has its work to do though they hold mistakes
        )
        self._user: tuple[int, str] | None = None  # another user's uid and home: whose parts these are
        self.in_job = False  # it makes the machine of a batch job: only what the site leaves open is the user's to set
        self._begin = time.monotonic()

    @cached_property
    def settings(self) -> config.Settings:
        """Raises BadSetting with every mistake there is."""
        loaded = self.inspect()
        return loaded.settings if self.is_lenient else loaded.checked()

    def inspect(self) -> config.Loaded:
        """The settings as far as they can be understood, and the mistakes in them."""
        if self._user is None:
            return config.inspect(self.config_file, in_job=self.in_job)
        uid, home = self._user
        environ = {"HOME": home, "XDG_CONFIG_HOME": "/nonexistent"}
        return config.inspect(self.config_file, environ=environ, uid=uid, in_job=True)

    def of_user(self, uid: int, home: str) -> Runtime:
        """Another user's parts, by the site's settings alone. For processes that became this user."""
        other = Runtime(None if self.config_file is None else str(self.config_file), verbose=self.verbose)
        other.is_lenient, other._user = self.is_lenient, (uid, home)
        return other

    @cached_property
    def folders(self) -> Folders:
        paths = self.settings.paths
        return Folders(paths.run, paths.scratch, paths.store, paths.logs)

    @cached_property
    def images(self) -> Images:
        from belljar.image.images import Images

        paths = self.settings.paths
        return Images(paths.store, paths.site_store, self.settings.image, self._templates_of, self._survey)

    @cached_property
    def overlays(self) -> Overlays:
        from belljar.image.store.qcow2 import Overlays

        return Overlays(self.settings.image)

    @cached_property
    def hypervisor(self) -> Hypervisor:
        settings, paths = self.settings, self.settings.paths
        return load(settings.qemu, paths.store, settings.machine.hypervisor, settings.libvirt, paths.site_store)

    @cached_property
    def reaper(self) -> Reaper:
        from belljar.machine.cleaning.reaper import Reaper

        return Reaper(self.folders, self.hypervisor)

    @cached_property
    def machines(self) -> Machines:
        from belljar.machine.outside.registry import Machines

        return Machines(self.folders, self.reaper)

    @cached_property
    def devices(self) -> Site:
        """The site's classes of devices. Raises BadSetting."""
        from belljar.config.devices import load

        return load(self.config_file or config.ETC / "belljar.toml")

    def converse(self, channel: socket.socket) -> Conversation:
        """A guest at the other end of this channel."""
        from belljar.guest.conversation import Conversation

        return Conversation(channel, self.settings.guest)

    def supervisor(self) -> Supervisor:
        """A keeper of machines."""
        from belljar.machine.services import Rules, Services
        from belljar.machine.supervisor import Supervisor

        settings = self.settings
        rules = Rules(
            settings.machine, settings.host, settings.context, settings.qemu,
            default_image=settings.image.default, hs06_per_cpu=settings.batch.hs06_per_cpu,
            publish=settings.network.publish, devices=lambda: self.devices,
        )  # fmt: skip
        return Supervisor(
            Services(
                self.hypervisor, self.images, self.overlays, self.converse, self.folders, rules, self._point,
                networks=Networks(settings.network, self.folders.run), showing=self._showing,
            )
        )  # fmt: skip

    def workshop(self) -> Workshop:
        """A machine of the default image that works on a disk nobody trusts."""
        from belljar.machine.workshop.workshop import Workshop

        self.images.ensure(self.settings.image.default)
        return Workshop(self.supervisor().keep, self.overlays, self.settings.image.default)

    def _templates_of(self, digest: str) -> list[str]:
        """The templates that stand on an image, in words."""
        templates = self.hypervisor.templates()
        return [f"template {item.key[:12]}" for item in templates if item.facts.get("image_digest") == digest]

    def _survey(self, disk: Path, size: int, target: Path) -> None:
        from belljar.jobs.disks import survey

        survey(self, disk, size, target)

    def _showing(self, what: str) -> AbstractContextManager[object]:
        """Say what a job waits for, where a person watches or -v was given: else stderr is the payload's alone."""
        if not sys.stderr or not (self.verbose or sys.stderr.isatty()):
            return nullcontext()
        from belljar.image.progress import begin_and_end

        return begin_and_end(what, sys.stderr)

    def _point(self, name: str) -> None:
        """A named point of a machine's life: told with `-v`. Tests set `testing.abort_at` to die there as by an accident."""
        if self.verbose and sys.stderr:  # closed, it is None, for which print takes stdout
            print(f"belljar: {time.monotonic() - self._begin:8.3f} s  {name}", file=sys.stderr)
        if name == self.settings.testing.abort_at:
            os.kill(os.getpid(), signal.SIGKILL)
