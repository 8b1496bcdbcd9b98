"""Whose signature a registry's images must have: `image.trust`, checked by the program cosign.
https://docs.sigstore.dev/cosign/verifying/verify/"""

from __future__ import annotations

import re
from pathlib import Path

from belljar.errors import BadSetting, CommandFailed, CommandMissing, NotPermitted
from belljar.image import Settings
from belljar.image.intake import sandbox

LINE = re.compile(r"(\*|[A-Za-z0-9][A-Za-z0-9._:/-]*) cosign((?: --[a-z][^\s]*)+)")
LONGEST = 300  # seconds
MISSING = "`image.trust` asks for a signature, which the program cosign checks: install it, or change the setting."


def rules(settings: Settings) -> list[tuple[str, list[str]]]:
    """`image.trust` as (registry or "*", options of `cosign verify`). Raises BadSetting."""
    matches = [(line, LINE.fullmatch(" ".join(line.split()))) for line in settings.trust]
    for line, match in matches:
        if match is None:
            hint = "As in `registry.example.org/physics cosign --key=/etc/belljar/physics.pub`; `*` is all registries."
            raise BadSetting(f"image.trust: {line!r} is not of the form `REGISTRY cosign --OPTION...`", hint=hint)
    return [(match[1].rstrip("/"), match[2].split()) for _, match in matches if match]


def whole(place: str) -> str:
    """HOST/NAME as Docker's rules complete it: what has no host is of Docker Hub."""
    host, slash, rest = place.partition("/")
    if not slash:
        return f"docker.io/library/{place}"
    if not (set(host) & set(".:") or host == "localhost"):
        return f"docker.io/{place}"
    return f"{host.lower()}/{rest}".replace("index.docker.io/", "docker.io/", 1)


def check(image: str, settings: Settings, folder: Path, env: dict[str, str]) -> None:
    """Raise NotPermitted or CommandMissing unless HOST/NAME@DIGEST is signed as the first rule that fits it asks."""
    image = whole(image)
    fits = (words for name, words in rules(settings) if name == "*" or image.startswith((f"{name}/", f"{name}@")))
    if (words := next(fits, None)) is None:
        return
    try:
        sandbox.run_in(folder, ["cosign", "verify", *words, image], LONGEST, settings.max_size, env=env)
    except CommandMissing as exc:
        raise CommandMissing(f"{image}: {exc.message}", hint=MISSING) from exc
    except CommandFailed as exc:
        lines = exc.message.splitlines()
        text = next((line for line in lines if line.lower().startswith("error")), lines[-1])[:300]
        hint = "Ask its maker to sign it, or the site for another rule (image.trust)."
        raise NotPermitted(f"{image}: not signed as `image.trust` asks: cosign: {text}", hint=hint) from exc
