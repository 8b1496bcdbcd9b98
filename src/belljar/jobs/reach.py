"""What `--allow` and `--secret` say, in a request; and the values of secrets, for the process that keeps the machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from belljar.errors import BadOption, BelljarError, InputMissing
from belljar.hints import Any
from belljar.host.files import read_capped
from belljar.machine.extras.secrets import VARIABLES
from belljar.model import NetworkMode, RunPayload, Secret, Work
from belljar.network.egress import list_of
from belljar.records import replace

FORM = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,99})=((?:env|file):.+?)((?:,host=[^,*]+)+)", re.DOTALL)
LARGEST_SECRET = 16 << 10


def understood(work: Work, values: dict[str, Any], asked: NetworkMode | None) -> Work:
    """Checks *values* of a request and completes them; the work, whose payload has the placeholders. Raises BadOption."""
    secrets = tuple(map(secret, values.get("secrets", ())))
    list_of("--allow", allow := tuple(values.get("allow", ())))
    if asked not in (None, NetworkMode.USER):
        what = "--secret" if secrets else "--allow"
        raise BadOption(f"{what} with --network {asked.value}: it is for a user network", hint="Give --network user.")
    values.update(allow=allow, secrets=secrets, network=NetworkMode.USER)
    if not secrets:
        return work
    if not isinstance(work, RunPayload):
        raise BadOption("--secret without a command: nobody in the guest would have its placeholder")
    sources = {os.fsencode(secret.source) for secret in secrets}
    env = {name: value for name, value in work.payload.env if b"env:" + name not in sources}
    env |= {each.name.encode(): each.placeholder.encode() for each in secrets} | VARIABLES
    return replace(work, payload=replace(work.payload, env=tuple(env.items())))


def secret(text: str) -> Secret:
    """NAME=env:VAR,host=HOST or NAME=file:PATH,host=HOST; of hosts there may be several. Raises BadOption."""
    if (match := FORM.fullmatch(text)) is None:
        what = f"--secret {text.partition('=')[0][:40]}"  # whatever follows may be the value
        form = "NAME=env:VAR,host=HOST or NAME=file:PATH,host=HOST"
        raise BadOption(f"{what}: not of the form {form}", hint="The value itself is never an option's.")
    hosts = tuple(match[3].split(",host=")[1:])
    if len(list_of("--secret", hosts).names) < len(hosts):
        raise BadOption(f"--secret {match[1]}: a host is given by its name, not by an address")
    kind, _, place = match[2].partition(":")
    return Secret(match[1], f"{kind}:{os.path.abspath(place) if kind == 'file' else place}", hosts)


def value_of(secret: Secret) -> bytes:
    """Raises InputMissing, BadOption."""
    kind, _, place = secret.source.partition(":")
    try:
        data = os.environb[os.fsencode(place)] if kind == "env" else read_capped(Path(place), LARGEST_SECRET)
    except (KeyError, OSError, BelljarError) as exc:
        hint = "Export the variable, or give a readable file of at most 16 KiB."
        raise InputMissing(f"--secret {secret.name}: {secret.source} cannot be read", hint=hint) from exc
    value = data.removesuffix(b"\n").removesuffix(b"\r")
    if not value or any(byte < 32 or byte == 127 for byte in value):
        raise BadOption(f"--secret {secret.name}: its value is empty, or has characters that a header cannot have")
    return value
