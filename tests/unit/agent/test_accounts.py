"""How a caller gets a name inside: from the text of the guest's files to their next text."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from belljar.agent.guest.accounts import Account, with_groups, with_user
from belljar.agent.wire import Words
from belljar.guest.conversation import account_words
from belljar.model import Account as Outside

PASSWD = "root:x:0:0:root:/root:/bin/bash\nbackup:x:34:34:backup:/var/backups:/usr/sbin/nologin\n"
GROUP = "root:x:0:\nbackup:x:34:\nusers:x:100:debian\n"


def account(**changes: Any) -> Account:
    """As the agent reads it off the wire."""
    base = {"name": "alice", "uid": 1000, "gid": 1000, "group": "alice", "home": "/home/alice", "shell": "/bin/sh"}
    outside = Outside(**{**base, **changes})
    return Account(Words(account_words(outside)))


def test_a_new_user_is_added_at_the_end() -> None:
    assert with_user(PASSWD, account()) == PASSWD + "alice:*:1000:1000::/home/alice:/bin/sh\n"


def test_a_file_without_a_last_newline_is_not_garbled() -> None:
    assert with_user(PASSWD[:-1], account()) == with_user(PASSWD, account())


def test_a_user_of_the_image_with_the_same_uid_keeps_working_and_ours_is_found_first() -> None:
    text = PASSWD + "debian:x:1000:1000::/home/debian:/bin/bash\n"
    changed = with_user(text, account())
    assert changed.endswith(text)
    assert next(line for line in changed.splitlines() if line.split(":")[2] == "1000").startswith("alice:")


def test_a_name_the_image_has_for_somebody_else_is_not_taken_away() -> None:
    changed = with_user(PASSWD, account(name="backup"))
    assert changed.startswith(PASSWD)
    assert changed.splitlines()[-1].startswith("backup_1000:*:1000:")


def test_root_stays_root() -> None:
    assert with_user(PASSWD, account(name="root", uid=0, gid=0)) == PASSWD
    assert with_user(PASSWD, account(name="toor", uid=0, gid=0)) == PASSWD


def test_groups_are_made_and_joined() -> None:
    changed = with_groups(GROUP, account(groups=[(100, "users"), (777, "physics"), (1000, "alice")]), "alice")
    assert changed.splitlines() == [
        "root:x:0:",
        "backup:x:34:",
        "users:x:100:debian,alice",
        "alice:x:1000:",
        "physics:x:777:alice",
    ]


def test_a_group_name_the_image_has_for_another_number_is_not_taken_away() -> None:
    assert with_groups(GROUP, account(group="backup"), "alice").splitlines()[-1] == "backup_1000:x:1000:"


names = st.text("abc_-.0é", min_size=1, max_size=8)
ids = st.integers(0, 1 << 31)
accounts = st.builds(
    account,
    name=names,
    uid=ids,
    gid=ids,
    group=names,
    groups=st.lists(st.tuples(ids, names), max_size=5, unique_by=lambda g: g[0]),
)


@given(accounts, accounts)
def test_adding_again_changes_nothing_and_no_line_is_ever_lost(one: Account, other: Account) -> None:
    passwd, group = PASSWD, GROUP
    for who in (one, other):
        passwd, group = with_user(passwd, who), with_groups(group, who, who.name)
    assert set(PASSWD.splitlines()) <= set(passwd.splitlines())
    assert {line.split(":")[2] for line in GROUP.splitlines()} <= {line.split(":")[2] for line in group.splitlines()}
    assert with_user(passwd, other) == passwd
    assert with_groups(group, other, other.name) == group
