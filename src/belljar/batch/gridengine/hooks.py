"""Changes of Grid Engine's own lists that `qconf` takes only as a whole file: read, changed by our part, written back.

complexes add|remove [NAME]   our resources (see COMPLEXES)
verifier set|unset FILE       `jsv_url` of the global configuration, and `qalter -a` allowed beside it
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from belljar.batch import Call
from belljar.batch.gridengine.dialect import NOTICE
from belljar.batch.gridengine.jsv import ASKED, ASKED_DISK, FLAG, SHELL
from belljar.batch.install.commands import Client
from belljar.errors import BadOption, BelljarError, CommandFailed, UsageError

TIMEOUT = 20.0
# What shows a list, and the option that takes it. By a file's name `qconf -Mconf` knows whose configuration it is.
LISTS = {"complexes": (("qconf", "-sc"), "-Mc"), "global": (("qconf", "-sconf", "global"), "-Mconf")}
# name shortcut type relop requestable consumable default urgency, sge_complex(5)
COMPLEXES = {
    ASKED: f"{ASKED} vmi STRING == YES NO NONE 0",
    ASKED_DISK: f"{ASKED_DISK} vmd MEMORY <= YES NO 0 0",
    FLAG: f"{FLAG} {FLAG} BOOL == YES NO 0 0",
    SHELL: f"{SHELL} vmx BOOL == YES NO 0 0",
    NOTICE: f"{NOTICE} vmc STRING == NO NO NONE 0",
}
ALLOWED = "a"  # of jsv_allowed_mod: belljar delays the next start of a job by `qalter -a`


def run(call: Call) -> int:
    """One change. Raises CommandFailed where the server refuses it."""
    match (call.name, *call.words):
        case ("complexes", "add"):
            _rewrite(call.client(), "complexes", with_complexes)
        case ("complexes", "remove", *names):
            _rewrite(call.client(), "complexes", lambda text: without_complexes(text, names or COMPLEXES))
        case ("verifier", "set" | "unset" as act, path):
            verifier = with_verifier if act == "set" else without_verifier
            _rewrite(call.client(), "global", lambda text: verifier(text, path))
        case _:
            raise BadOption(f"{call.name}: wrong words", hint="complexes add|remove; verifier set|unset FILE.")
    return 0


def with_complexes(text: str) -> str:
    """The list of complexes with ours at its end, where they are missing. Raises UsageError where a name is taken."""
    rows = [line.split() for line in _lines(text)]
    for name, line in COMPLEXES.items():
        ours = line.split()
        present = [row for row in rows if row[0] == name or row[1] == ours[1]]
        if not present:
            rows.append(ours)
        elif [row[:6] for row in present] != [ours[:6]]:
            what = f"complex {present[0][0]}: there is one, but not as belljar needs it: {line}"
            raise UsageError(what, hint="Change it or give it another name, then install again.")
    return "".join(f"{' '.join(row)}\n" for row in rows)


def without_complexes(text: str, names: Collection[str] = COMPLEXES) -> str:
    """The list without ours, or those of these names."""
    return "".join(f"{line}\n" for line in _lines(text) if line.split()[0] not in names)


def with_verifier(text: str, path: str) -> str:
    """The global configuration with our verifier. Raises UsageError where the site has its own."""
    own = value(text, "jsv_url")
    if own.lower() not in ("", "none", path):
        hint = "Let it start belljar's, or use `qsub -jsv`."
        raise UsageError(f"jsv_url: the site has its own verifier, {own}", hint=hint)
    allowed = [word for word in value(text, "jsv_allowed_mod").split(",") if word]
    if ALLOWED not in allowed:
        allowed.insert(0, ALLOWED)
    return _put(_put(text, "jsv_url", path), "jsv_allowed_mod", ",".join(allowed))


def without_verifier(text: str, path: str) -> str:
    """The global configuration without it; what `qalter` may do then is not the verifier's any more."""
    return _put(text, "jsv_url", "NONE") if value(text, "jsv_url") == path else text


def value(text: str, key: str) -> str:
    """A key's value in what `qconf -sconf`, `-sq` or `-se` shows; "" where it is not there."""
    pairs = (line.partition(" ") for line in _lines(text))
    return next((rest.strip() for name, _, rest in pairs if name == key), "")


def _put(text: str, key: str, new: str) -> str:
    others = [line for line in _lines(text) if line.split()[0] != key]
    return "".join(f"{line}\n" for line in [*others, f"{key} {new}"])


def _lines(text: str) -> list[str]:
    """Lines without comments; those that end with a backslash go on in the next one."""
    joined = text.replace("\\\n", " ")
    return [" ".join(line.split()) for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def _rewrite(client: Client, name: str, change: Callable[[str], str]) -> None:
    show, option = LISTS[name]
    before = "".join(f"{line}\n" for line in _lines(client.run(show, TIMEOUT).decode()))
    after = change(before)
    if after == before:
        return
    with tempfile.TemporaryDirectory(prefix="belljar-") as folder:
        path = Path(folder, name)
        path.write_text(after)
        try:
            client.run(("qconf", option, str(path)), TIMEOUT)
        except CommandFailed:  # `-Mc` carries out what of it is possible
            path.write_text(before)
            with suppress(BelljarError):
                client.run(("qconf", option, str(path)), TIMEOUT)
            raise
