"""What is decided before a machine is started. Here: how its guest is contextualized, as a value; contexts.py decides which way."""

from __future__ import annotations

from belljar.context import Chosen, Seed
from belljar.host.quick_imports import sha256
from belljar.hypervisor import DomainSpec
from belljar.image import BootFiles, Image
from belljar.model import Context
from belljar.records import dataclass


@dataclass(frozen=True)
class GuestContext:
    """How a guest is contextualized, with all that a domain needs for it."""

    chosen: Chosen
    files: BootFiles
    image: Image  # whose disk is the one the machine's own stands on
    seed: Seed | None = None
    layer: str = ""  # digest of what was put into the image's disk
    private: str = ""  # why it is of use to one machine alone, so that there is no template; empty: it is not

    @property
    def has_own_init(self) -> bool:
        """Is the image's own init started, and not belljar's?"""
        return self.chosen.context is not Context.RAMDISK

    @property
    def digest(self) -> str:
        """For what is booted, and part of a template's key."""
        more = [self.seed.digest if self.seed is not None else "", self.layer]
        if not any(more):
            return self.files.digest
        return sha256("\n".join([self.files.digest, *more]).encode()).hexdigest()

    def make_seed(self, spec: DomainSpec) -> None:
        """Make the seed of a cold start or a template, if it is not there; a clone has its template's."""
        if self.seed is not None and spec.seed is not None and not spec.seed.exists():
            self.seed.write(spec.seed)
