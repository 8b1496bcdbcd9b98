"""Accounts: from the text of a file to its next text."""

from __future__ import annotations

import os
import stat
from _collections_abc import Callable

from belljar.agent.guest.system import read_file, write_file
from belljar.agent.wire import MIB, Words, join


class Account:
    """The user a payload runs as."""

    def __init__(self, words: Words) -> None:
        begin = words.at
        self.name, self.uid, self.gid = words.text(), words.number(), words.number()
        self.group, self.home, self.shell = words.text(), words.text(), words.text()
        self.groups = [(int(pair[0]), Words([pair[1]]).text()) for pair in words.rows(2)]
        self.group_ids = [self.gid, *(number for number, _ in self.groups if number != self.gid)]
        self.home_path = self.home.encode("utf-8", "surrogateescape")
        self.key = join(*words.words[begin : words.at])

    def is_plain_root(self) -> bool:
        """Every guest has this one."""
        return self.uid == 0 and self.name == "root" and not any(number for number, _ in self.groups)


def free_name(text: str, name: str, number: int) -> str:
    """*name*, or a variant of it where the file has it with another number: nobody of the image is renumbered."""
    for line in text.splitlines():
        fields = line.split(":")
        if fields[0] == name and fields[2:3] != [str(number)]:
            return f"{name}_{number}"
    return name


def with_user(text: str, account: Account) -> str:
    """/etc/passwd with the account, which has no password and no entry in /etc/shadow. A user of the same uid keeps working; ours is
    found first by uid, except root's."""
    uid = account.uid
    name = free_name(text, account.name, uid)
    rows = [line.split(":") for line in text.splitlines()]
    if any(row[0] == name for row in rows) or (uid == 0 and any(row[2:3] == ["0"] for row in rows)):
        return text
    line = f"{name}:*:{uid}:{account.gid}::{account.home}:{account.shell}\n"
    if any(row[2:3] == [str(uid)] for row in rows):
        return line + text
    return ended(text) + line


def with_groups(text: str, account: Account, user: str) -> str:
    """/etc/group with the account's groups, and the user in the supplementary ones."""
    lines = ended(text).splitlines()
    for gid, name, is_member in [(account.gid, account.group, False)] + [(g, n, True) for g, n in account.groups]:
        for index, line in enumerate(lines):
            fields = line.split(":")
            if fields[2:3] == [str(gid)] and len(fields) == 4:
                members = [member for member in fields[3].split(",") if member]
                if is_member and gid != account.gid and user not in members:
                    lines[index] = ":".join([*fields[:3], ",".join([*members, user])])
                break
        else:
            lines.append(f"{free_name(text, name, gid)}:x:{gid}:{user if is_member else ''}")
    return "".join(line + "\n" for line in lines)


def add_to_files(account: Account) -> None:
    """Write the account into /etc/passwd and /etc/group: the host's database has it, and so nothing in it that a file cannot have."""
    user = free_name(read_file("/etc/passwd", MIB).decode("utf-8", "surrogateescape"), account.name, account.uid)
    rewrite("/etc/passwd", lambda text: with_user(text, account))
    rewrite("/etc/group", lambda text: with_groups(text, account, user))


def rewrite(path: str, change: Callable[[str], str]) -> None:
    """Change a text file of the system; only its end where that is enough."""
    old = read_file(path, 16 * MIB).decode("utf-8", "surrogateescape")
    new = change(old)
    if new.startswith(old):
        if new != old:
            write_file(path, new[len(old) :].encode("utf-8", "surrogateescape"), flags=os.O_APPEND)
        return
    before, draft = os.stat(path), path + ".belljar"
    write_file(draft, new.encode("utf-8", "surrogateescape"))
    os.chmod(draft, stat.S_IMODE(before.st_mode))
    os.chown(draft, before.st_uid, before.st_gid)
    os.rename(draft, path)


def ended(text: str) -> str:
    return text + "\n" if text and not text.endswith("\n") else text
