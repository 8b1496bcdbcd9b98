"""What owners have beside machines, on both databases: key pairs, tags, consoles, access keys."""

import os
from typing import Any

import pytest
from tests.contracts.test_lease_desk import ADA, WANTED, Site, at_once

from belljar.errors import BadRequest, KeyPairExists, LeaseDenied, NoSuchLease
from belljar.lease import AccessKey, Console, KeyPair, Tag
from belljar.lease import belongings as kept
from belljar.lease.desk import Owner
from belljar.lease.ec2 import keyring
from belljar.lease.store import Store
from belljar.records import replace

PAIR = KeyPair("key-1", "ada", "mine", "ssh-ed25519 AAAA", "SHA256:x")


@pytest.fixture
def site(store: Store) -> Site:
    return Site(store)


def test_key_pairs(site: Site) -> None:
    def pairs(owner: str) -> list[KeyPair]:
        return site.store.read(lambda book: book.find(KeyPair, owner=owner))

    def remove(owner: str) -> None:
        site.store.write(lambda book: kept.remove_key_pairs(book, owner, "mine"))

    add = lambda pair: site.store.write(lambda book: kept.add_key_pair(book, pair, {}))  # noqa: E731
    added = at_once(lambda number: add(replace(PAIR, id=f"key-{number}")))
    assert sum(isinstance(one, KeyPairExists) for one in added) == 9
    assert [one.name for one in pairs("ada")] == ["mine"] and pairs("bob") == []
    assert site.desk.run(ADA, replace(WANTED, key="mine"))[0].wanted.key == "mine"
    remove("bob")
    assert len(pairs("ada")) == 1
    remove("ada")
    remove("ada")
    assert pairs("ada") == []


def test_tags(site: Site) -> None:
    def tag(ids: list[str], tags: dict[str, str]) -> None:
        site.store.write(lambda book: kept.tag(book, "ada", ids, tags))

    def untag(owner: str, id: str, tags: dict[str, str | None]) -> None:
        site.store.write(lambda book: kept.untag(book, owner, [id], tags))

    def there() -> list[tuple[str, str]]:
        return [(one.resource, one.key) for one in site.store.read(lambda book: book.find(Tag, owner="ada"))]

    _, (one, two) = site.desk.run(ADA, replace(WANTED, count=2, tags=(("Name", "head"),)))
    tag([one.id], {"role": "nfs", "Name": "first"})
    shown = site.desk.machines(ADA)
    assert [dict(machine.tags) for machine in shown] == [{"Name": "first", "role": "nfs"}, {"Name": "head"}]
    with pytest.raises(NoSuchLease):
        tag([two.id, "i-none"], {"a": "b"})
    with pytest.raises(NoSuchLease):
        untag("bob", one.id, {"role": None})
    with pytest.raises(LeaseDenied, match="51 tags; 50 are the most"):
        tag([one.id], {str(number): "" for number in range(49)})
    untag("ada", one.id, {"role": "other", "Name": None})
    assert there() == sorted([(one.id, "role"), (two.id, "Name")])
    tag([one.id], {"lease:state": "told by the service"})
    tag([one.id], {str(number): "" for number in range(49)})  # the service's own do not count
    untag("ada", one.id, {})
    assert there() == sorted([(one.id, "lease:state"), (two.id, "Name")])


def test_consoles_are_their_owners_alone(site: Site) -> None:
    def console(owner: str) -> Console:
        return site.store.read(lambda book: kept.console(book, owner, machine.id))

    _, (machine,) = site.desk.run(ADA, WANTED)
    assert console("ada").text == b""
    site.store.write(lambda book: book.put(Console(machine.id, b"\x00\xff" * 30_000, 5.0)))
    assert (len(console("ada").text), console("ada").at) == (60_000, 5.0)
    with pytest.raises(NoSuchLease):
        console("bob")
    site.store.write(lambda book: book.forget_consoles(site.moment + 1))
    assert console("ada").text  # it lives
    site.desk.terminate(ADA, [machine.id])
    for until, size in ((site.moment, 60_000), (site.moment + 1, 0)):
        site.store.write(lambda book, until=until: book.forget_consoles(until))  # type: ignore[misc]
        assert len(console("ada").text) == size


def test_a_revoked_access_key_is_none(site: Site) -> None:
    def ask(act: str, **facts: str) -> dict[str, Any]:
        return keyring.answer(site.store, b"site", ADA, {"act": act, **facts})

    def owner() -> Owner | None:
        return keyring.owner_of(site.store.read(lambda book: book.get(AccessKey, id)))

    id = ask("new")["id"]
    assert owner() == ADA
    with pytest.raises(BadRequest):
        ask("revoke", id="BJ2")
    ask("revoke", id=id)
    assert owner() is None and [one.id for one in ask("list")["keys"]] == [id]


def test_of_ten_at_once_an_owner_gets_no_more_access_keys_than_there_may_be(site: Site) -> None:
    for _ in range(keyring.MOST - 1):
        keyring.answer(site.store, b"site", ADA, {"act": "new"})
    made = at_once(lambda number: keyring.answer(site.store, b"site", ADA, {"act": "new"}))
    assert sum(isinstance(one, BadRequest) for one in made) == 9


def test_an_access_key_has_the_group_that_its_owner_has_now(site: Site) -> None:
    """Policies of groups count at once, by every door."""
    me = Owner.of(os.geteuid())
    made = keyring.answer(site.store, b"site", replace(me, group="of-long-ago"), {"act": "new"})
    assert keyring.owner_of(site.store.read(lambda book: book.get(AccessKey, made["id"]))) == me
