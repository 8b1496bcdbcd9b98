"""The gates before every payload: a clone is not a twin, and has all that was asked for. No proof, no payload."""

from __future__ import annotations

import os

from belljar.errors import GuestRefused, IdentityRefused, PlugRefused
from belljar.guest import Guest, Identity, IdentityProof
from belljar.hypervisor import DomainSpec
from belljar.machine.life.life import Lifecycle
from belljar.model import MIB, NetworkMode
from belljar.network import Link
from belljar.records import replace

LARGEST_SKEW = 0.1  # seconds between the guest's clock and ours
# Where others reach a guest's ssh server, its keys are part of who it is. Elsewhere nobody would see new ones, and making
# them takes an emulated guest longer than all the rest.
REACHED = (NetworkMode.BRIDGE, NetworkMode.ISOLATED)
FRESH = 64  # bytes of entropy for the guest's kernel
BOOKKEEPING = 32  # the guest's kernel takes less than the 32nd part of new memory for itself


async def prove(guest: Guest, identity: Identity, link: Link, life: Lifecycle, *, is_clone: bool = False) -> None:
    """Give the guest this identity and check what its kernel then says. Raises IdentityRefused."""
    proof = await guest.identify(identity)
    if abs(proof.clock_skew) > LARGEST_SKEW:
        proof = replace(proof, clock_skew=await guest.set_clock())
    check(identity, proof)
    if is_clone and link.mode in REACHED:
        try:
            await guest.renew_keys()
        except GuestRefused as error:
            hint = "Put our agent and ssh-keygen into the image, or add `--start cold`."
            raise PlugRefused(f"the clone's ssh server has its template's keys: {error.message}", hint=hint) from error
    proved = {"hostname": proof.hostname, "machine_id": proof.machine_id, "mac": proof.mac}
    life.prove(identity, proof.sample, **proved, skew=round(proof.clock_skew, 6))


def new_identity(id: str, link: Link) -> Identity:
    """Names and secrets nobody had before."""
    return Identity(
        hostname=f"belljar-{id}", machine_id=os.urandom(16).hex(), nonce=os.urandom(16).hex(), entropy=os.urandom(FRESH),
        mac=link.mac, address=link.address, gateway=link.gateway, dns=link.dns,
    )  # fmt: skip


def check(identity: Identity, proof: IdentityProof) -> None:
    """Raise IdentityRefused unless the guest is who it was told to be, at the right time."""
    for name in ("hostname", "machine_id", "nonce", "mac"):
        if getattr(proof, name) != getattr(identity, name):
            raise IdentityRefused(
                f"the guest's {name} is {getattr(proof, name)[:80]!r}, not {getattr(identity, name)!r}"
            )
    if len(proof.sample) != 64 or any(digit not in "0123456789abcdef" for digit in proof.sample):
        raise IdentityRefused("the guest gave no sample of its random numbers")
    if abs(proof.clock_skew) > LARGEST_SKEW:
        raise IdentityRefused(f"the guest's clock is {proof.clock_skew:+.3f} s off")


async def take_all_into_use(guest: Guest, spec: DomainSpec, life: Lifecycle) -> None:
    """Have the guest use all the processors and memory that it was asked for. Raises PlugRefused: it then boots cold."""
    if spec.frame is None or spec.is_like_template:
        return
    disk = spec.disk_size if spec.disk_size > spec.of_template.disk_size else 0
    try:
        with life.phase("grow"):
            cpus, memory = await guest.grow(spec.cpus, plugged=spec.plugged, surplus=spec.surplus, disk=disk)
    except GuestRefused as error:
        raise PlugRefused(f"the clone did not grow to its size: {error.message}") from error
    least = spec.plugged - spec.plugged // BOOKKEEPING
    if cpus != spec.cpus or memory < least:
        has = f"the clone has {cpus} processors and {memory // MIB} MiB of memory in use"
        raise PlugRefused(f"{has}, and should have {spec.cpus} and more than {least // MIB} MiB")
    life.record.write("grown", by=sorted(spec.growth), cpus=cpus, memory=memory)
