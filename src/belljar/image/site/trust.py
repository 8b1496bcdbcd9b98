"""Who may publish which names: the lines of `image.trust`, read and applied. Pure but for the signatures themselves.

    debian*|site-*  ed25519:MCowBQYDK2VwAyEA...          a public key, as `belljar image key` prints it
    cernvm*         x509:/etc/grid-security/certificates:/DC=ch/DC=cern/.*   a folder of authorities, a pattern of the whole DN
    scratch-*       unsigned                              nobody has to sign

The first line that fits a name and whose signer has signed counts. A name that fits no line cannot be published.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from belljar.errors import BadSetting, SignatureRefused
from belljar.image.site import Signature
from belljar.records import dataclass

ED25519, X509, UNSIGNED = "ed25519", "x509", "unsigned"
FORM = 'Write `NAMES ed25519:KEY`, `NAMES x509:FOLDER:DN` or `NAMES unsigned`; several NAMES with | between, `*` for "any".'
NAMES = re.compile(r"[A-Za-z0-9*?._\[\]-]{1,100}")


@dataclass(frozen=True)
class Rule:
    """One line: these names, from this signer."""

    names: tuple[str, ...]  # patterns as the shell's
    kind: str  # ED25519, X509, UNSIGNED
    key: str = ""  # ED25519: base64 of the 32 bytes
    folder: Path = Path()  # X509: certificates of authorities
    dn: str = ""  # X509: what the whole distinguished name must fit

    def covers(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.names)


def read_rules(lines: Sequence[str]) -> tuple[Rule, ...]:
    """The policy in the setting's lines. Raises BadSetting."""
    return tuple(_rule(line) for line in lines)


def signer_of(text: str, names: str = "*") -> Rule:
    """The rule for one signer, in the words of a line's second half. Raises BadSetting."""
    return _rule(f"{names} {text}")


def _rule(line: str) -> Rule:
    words = line.split(None, 1)
    if len(words) != 2:
        raise BadSetting(f"image.trust: {line!r} does not name a signer", hint=FORM)
    names = tuple(words[0].split("|"))
    if not all(map(NAMES.fullmatch, names)):
        raise BadSetting(f"image.trust: {words[0]!r} are not names of images", hint=FORM)
    kind, _, rest = words[1].strip().partition(":")
    if kind == UNSIGNED and not rest:
        return Rule(names, UNSIGNED)
    if kind == ED25519:
        from belljar.image.site.signing import check_public_key

        return Rule(names, ED25519, key=check_public_key(rest))
    if kind == X509:
        folder, _, dn = rest.partition(":")
        return Rule(names, X509, folder=_absolute(folder, line), dn=_pattern(dn, line))
    raise BadSetting(f"image.trust: {line!r} names no signer belljar knows", hint=FORM)


def _absolute(folder: str, line: str) -> Path:
    if not folder.startswith("/"):
        raise BadSetting(f"image.trust: {line!r}: the folder of authorities must be an absolute path", hint=FORM)
    return Path(folder)


def _pattern(dn: str, line: str) -> str:
    try:
        re.compile(dn)
    except re.error as exc:
        raise BadSetting(f"image.trust: {dn!r} is not a pattern: {exc}", hint=FORM) from exc
    if not dn:
        raise BadSetting(
            f"image.trust: {line!r} lets anybody with a certificate publish", hint="Give a pattern of DNs."
        )
    return dn


def moment(seconds: float) -> datetime:
    """Seconds since the epoch as certificates have it: in UTC, without a time zone."""
    return datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None)


def judge(
    name: str, what: bytes, signatures: Sequence[Signature], rules: Sequence[Rule], now: datetime, *, shown: str
) -> str:
    """Who signed *what*, being one who may publish *name*; "" where the name needs no signature. *shown*: its name in
    messages. Raises SignatureRefused."""
    mine = [rule for rule in rules if rule.covers(name)]
    if not mine:
        raise SignatureRefused(f"{shown}: nobody may publish the name {name!r} (no line of `image.trust` has it)")
    return _first_signer(what, signatures, mine, now, f"{shown}: not signed by one who may publish {name!r}")


def judge_index(
    what: bytes, signatures: Sequence[Signature], rules: Sequence[Rule], now: datetime, *, shown: str
) -> str:
    """Who signed an index: anybody who may publish something. Raises SignatureRefused."""
    if not rules:
        raise SignatureRefused(f"{shown}: nobody may publish anything, for `image.trust` is empty")
    return _first_signer(what, signatures, rules, now, f"{shown}: not signed by anybody `image.trust` names")


def _first_signer(
    what: bytes, signatures: Sequence[Signature], rules: Sequence[Rule], now: datetime, complaint: str
) -> str:
    reasons: list[str] = []
    for rule in rules:
        if rule.kind == UNSIGNED:
            return ""
        for signature in signatures:
            try:
                if signer := _signer(what, signature, rule, now):
                    return signer
            except SignatureRefused as exc:
                reasons.append(exc.message)
    why = "; ".join(dict.fromkeys(reasons)) or (
        "it has no signature" if not signatures else "its signers are not named there"
    )
    raise SignatureRefused(f"{complaint}: {why}")


def _signer(what: bytes, signature: Signature, rule: Rule, now: datetime) -> str:
    """Who signed, in readable form; "" when this is not the rule's signer. Raises SignatureRefused for a signature by the
    rule's signer that is wrong."""
    from belljar.image.site import signing

    if rule.kind == ED25519:
        if signature.key != rule.key:
            return ""
        signing.verify_ed25519(signature.key, signature.value, what)
        return f"{ED25519}:{rule.key}"
    if not signature.certificates:
        return ""
    key, dn = signing.check_chain(signature.certificates, rule.folder, now)
    if not re.fullmatch(rule.dn, dn):
        raise SignatureRefused(f"{dn} is not one `image.trust` names")
    signing.verify_key(key, signature.value, what)
    return dn
