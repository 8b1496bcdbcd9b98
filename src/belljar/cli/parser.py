"""What the parsers of all verbs share: the global options, the forms of sizes and durations, one way to refuse."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from belljar.errors import BadOption
from belljar.hints import Any, NoReturn, TypeVar
from belljar.records import dataclass, field

T = TypeVar("T")
WIDTH = 110  # of help texts; a narrower terminal wraps them


class Formatter(argparse.HelpFormatter):
    """Help texts of a fixed width (argparse would import shutil to ask for it), the same in every Python: until 3.12
    argparse wrote `-o FILE, --output FILE`, and ignored the names of subcommands when it set the width of the column."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=WIDTH)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if action.help is not argparse.SUPPRESS:
            for below in self._iter_indented_subactions(action):
                length = len(self._format_action_invocation(below)) + self._current_indent
                self._action_max_length = max(self._action_max_length, length)


class Parser(argparse.ArgumentParser):
    """A parser that raises BadOption, takes no abbreviated options and knows the global ones."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("conflict_handler", "resolve")  # a verb's own -v stands before the global one
        super().__init__(allow_abbrev=False, formatter_class=Formatter, **kwargs)
        self.set_defaults(prog=self.prog)  # with the act of a verb that has some
        common = self.add_argument_group("options of every verb") if kwargs.get("add_help", True) else self
        common.add_argument("--config", dest="config_file", metavar="FILE", help=argparse.SUPPRESS)
        common.add_argument("-v", "--verbose", action="store_true", help=argparse.SUPPRESS)

    def take(self, verb: Verb) -> None:
        """Its options and parameters, with those of its acts; `args.act` and `args.carry_out` are of the one that is meant."""
        self.set_defaults(carry_out=verb.run)
        verb.options(self) if callable(verb.options) else add(self, verb.options)
        below = self.add_subparsers(dest="act", metavar="ACT", required=True) if verb.acts else None
        for name, act in verb.acts.items():
            assert below is not None
            below.add_parser(name, help=act.help).take(act)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raises BadOption with the word that was meant."""
        if action.choices is not None and value not in action.choices:
            from belljar.jobs import plain

            words = [str(one) for one in action.choices]
            what = action.metavar if isinstance(action.metavar, str) else "/".join(action.option_strings) or action.dest
            hint = f"One of {', '.join(words)}." + meant(str(value), words)
            raise BadOption(f"{what} {plain(str(value))!r}: no such word for `{self.prog}`", hint=hint)

    def error(self, message: str) -> NoReturn:
        raise BadOption(message, hint=f"See `{self.prog} --help`.")


def meant(word: str, words: Iterable[str], before: str = "") -> str:
    """A sentence about the word somebody probably meant; "" where none is near."""
    import difflib

    close = difflib.get_close_matches(word, list(words), n=1)
    return f" Did you mean `{before}{close[0]}`?" if close else ""


@dataclass(frozen=True)
class Verb:
    """What a verb, or an act of one, does and takes."""

    help: str
    run: Callable[[argparse.Namespace, Any], int] | None = None  # raises what goes wrong as BelljarError
    options: str | Callable[[argparse.ArgumentParser], None] = ""  # rows for `add`, or what adds them
    acts: Mapping[str, Verb] = field(default_factory=dict)
    needs_house: bool = True  # False: it works though everything else is broken, and gets None
    usage: str = ""


def acts(rows: str, functions: Mapping[str, Callable[[argparse.Namespace, Any], int]]) -> dict[str, Verb]:
    """The acts of a verb from a table: `# NAME | what it does` begins one, its options and parameters follow."""
    found = {}
    for part in re.split(r"^\s*# ", _joined(rows), flags=re.MULTILINE)[1:]:
        head, _, options = part.partition("\n")
        name, _, text = head.partition(" | ")
        found[name] = Verb(text, functions[name], options)
    return found


def _joined(rows: str) -> str:
    lines = [""]
    for line in rows.splitlines():
        if (bare := line.lstrip()).startswith("| "):
            lines[-1] += bare[1:]
        else:
            lines.append(line)
    return "\n".join(lines)


def add(parser: argparse.ArgumentParser, rows: str) -> None:
    """Options and parameters from a table, one a line; a line that begins with | goes on with the one above.

    -n --dry-run | text         a switch             TIME, SIZE, MOMENT, YYYYMM and N are read as such
    --grace TIME | text         an option with a value; `*` behind it: repeatable; `?`: empty without one; `=WORD`: its default; `!`: required
    FILE :path | text           a parameter that is a path
    IMAGE * @images | text      a parameter, any number of them (`+`: at least one, `?`: at most one), as args.images
    / --qemu @which | text      only one of those with a slash may be given; args.which is the switch's name
    [the machine]               those that follow have this heading
    """
    either, under = None, parser
    for row in filter(str.strip, _joined(rows).splitlines()):
        if row.strip().startswith("["):
            under = parser.add_argument_group(row.strip(" []"))  # type: ignore[assignment]
            continue
        left, _, text = row.partition(" | ")
        names, facts, words = list[str](), dict[str, Any](help=text.strip()), left.split()
        for word in words:
            if word.startswith("-"):
                names.append(word)
            elif word in ("*", "+", "?"):
                facts.update({"default": []} if word == "*" else {})  # argparse asks for what has none
                facts.update({"action": "append"} if names and word == "*" else {"nargs": word})
                # Text would be read as its type is.
                facts.update(
                    {"const": 0.0 if facts.get("type") is as_duration else ""} if names and word == "?" else {}
                )
            elif word[0] in "@=":
                facts["dest" if word[0] == "@" else "default"] = word[1:]
            elif word == ":path":
                facts["type"] = Path
            elif word == "!":
                facts["required"] = True
            elif word.startswith("{"):
                facts["choices"] = word[1:-1].split(",")
            elif word != "/":
                facts["metavar"] = word
                facts.update({"type": TYPES[word]} if word in TYPES else {})
        if not names:
            names = [facts.pop("dest", str(facts.get("metavar", "")).lower())]
        elif not facts.keys() & {"metavar", "choices"}:
            kept = {"action": "store_const", "const": names[-1][2:]} if "dest" in facts else {"action": "store_true"}
            facts.update(kept)
        if words[0] == "/":
            either = either or parser.add_mutually_exclusive_group(required=facts.pop("required", False))
        (either if words[0] == "/" and either else under).add_argument(*names, **facts)


def as_size(text: str) -> int:
    """Bytes, for `type=`."""
    from belljar.host.values import size

    return _read(size, text)


def as_duration(text: str) -> float:
    """Seconds, for `type=`."""
    from belljar.host.values import duration

    return _read(duration, text)


def _read(read: Callable[[str], T], text: str) -> T:
    try:
        return read(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def as_moment(text: str) -> float:
    """Seconds since the epoch, for `type=`: a time of the next 24 hours, a date and time, or +DURATION."""
    import time
    from datetime import datetime, timedelta

    if text.startswith("+"):
        return time.time() + as_duration(text[1:])
    now = datetime.now()
    try:
        if "T" in text or " " in text or text.count("-") == 2:
            return datetime.fromisoformat(text).timestamp()
        moment = datetime.combine(now.date(), datetime.strptime(text, "%H:%M").time())
        return (moment if moment > now else moment + timedelta(days=1)).timestamp()
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text}: no moment such as 18:30, 2026-12-24T18:00 or +45m") from None


def as_month(text: str) -> str:
    """YYYYMM, for `type=`."""
    if re.fullmatch(r"[0-9]{4}(0[1-9]|1[0-2])", text):
        return text
    raise argparse.ArgumentTypeError(f"{text[:80]}: not a month such as 202611")


TYPES: Mapping[str, Callable[[str], object]] = {
    "TIME": as_duration, "SIZE": as_size, "MOMENT": as_moment, "YYYYMM": as_month, "N": int,
}  # fmt: skip
FORMAT = "--format {table,json} =table | for people or for programs"
MACHINE = """ID @machine | the machine's id, a unique prefix of it, its name, or its batch job's id (slurm:4711); root: USER/ID too"""
MACHINES = MACHINE.replace("@machine", "+ @machines")
