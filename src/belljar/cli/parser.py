"""What the parsers of all verbs share: tables of options, the global options, the forms of sizes and times, one way to refuse.

A verb writes its options as a table, one row a line:

    --grace TIME | time between TERM and the machine's end
    FILE ? =/etc/belljar/bait.toml | its settings
    / --qemu @which | what QEMU wrote to stderr

    table  = { "# " act { " +" shared } " | " help | "$ " usage | "[" heading "]" | row }    a heading holds for the rows below it;
                                the rows of several acts come last, by the names that `acts` has for them, and `format`
    row    = { word } [ " | " help ]                            a line that begins with "| " goes on with the one above;
                                                                a row without a help text is not shown
    word   = "-n" | "--name"    the names of an option; a row without any is a parameter
           | "NAME"             how help calls the value, and how it is read (`TYPES`); an option without a value is a switch
           | "{a,b}"            the values there are; "{Kind}": those of this enumeration of the model
           | "*" | "+" | "?"    any number of values, at least one, at most one (an option without it is False);
                                an option with * is repeatable
           | "..."              all that follows, options too
           | "=text"            the default
           | "!"                an option that must be given
           | "@name"            the attribute of `args` (else the longest name, or the parameter in small letters);
                                a switch stores its own name there
           | "/"                only one of the rows with a slash may be given
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from belljar import model
from belljar.errors import BadOption
from belljar.hints import Any, NoReturn
from belljar.jobs import plain
from belljar.records import dataclass, field

Args = argparse.Namespace
# Returns the exit code, or nothing for 0; raises what goes wrong as BelljarError.
Act = Callable[[Args, Any], int | None]
WIDTH = 110  # of help texts; a narrower terminal wraps them


class Formatter(argparse.HelpFormatter):
    """Help texts of a fixed width (argparse would import shutil to ask for it), with a value once per option: until 3.12
    argparse wrote `-o FILE, --output FILE`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=WIDTH)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


class Parser(argparse.ArgumentParser):
    """A parser that raises BadOption, takes no abbreviated options and knows the global ones."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=Formatter, **kwargs)
        self.set_defaults(prog=self.prog)  # with the act of a verb that has some
        self.is_cut = False  # the words from `--` on are its command, which are nothing of argparse's
        self._positionals.title = "arguments"
        self.add_argument("--config", dest="config_file", metavar="FILE", help=argparse.SUPPRESS)
        self.add_argument("-v", "--verbose", action="store_true", help=argparse.SUPPRESS)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        at = args.index("--") if self.is_cut and "--" in args else len(args)
        parsed, rest = super().parse_known_args(args[:at], namespace)
        if self.is_cut:
            parsed.command = args[at:]
        return parsed, rest

    def take(self, verb: Verb) -> None:
        """Its options and parameters, with those of its acts; `args.act` and `args.carry_out` are of the one that is meant."""
        if (run := verb.run) is not None:
            self.set_defaults(carry_out=lambda args, runtime: run(args, runtime) or 0)
        add(self, verb.options)
        if verb.acts:
            below = self.add_subparsers(dest="act", title="commands", metavar="COMMAND", required=True)
            for name, act in verb.acts.items():
                below.add_parser(
                    name, help=act.help, description=f"{act.help[0].upper()}{act.help[1:]}.", usage=act.usage or None
                ).take(act)

    def format_help(self) -> str:
        """What it does, examples, usage, and each option."""
        head, rest, examples = self._get_formatter(), self._get_formatter(), examples_of(self.prog)
        head.add_text(self.description)
        rest.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        for group in (self._positionals, *self._action_groups[2:], self._optionals):
            rest.start_section(group.title)
            rest.add_arguments(group._group_actions)
            rest.end_section()
        rest.add_text(self.epilog)
        return "\n".join(filter(None, (head.format_help(), examples and f"examples:\n{examples}", rest.format_help())))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raises BadOption with the word that was meant."""
        if action.choices is not None and value not in action.choices:
            words = list(map(str, action.choices))
            what = action.metavar if isinstance(action.metavar, str) else "/".join(action.option_strings) or action.dest
            hint = f"One of {', '.join(words)}." + meant(str(value), words)
            raise BadOption(f"{what} {plain(str(value))!r}: no such word for `{self.prog}`", hint=hint)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """The value that is meant. What is wrong with another text, the ValueError says."""
        try:
            return action.type(arg_string) if callable(action.type) else arg_string
        except ValueError as exc:
            raise argparse.ArgumentError(action, str(exc)) from None

    def error(self, message: str) -> NoReturn:
        raise BadOption(message, hint=f"See `{self.prog} --help`.")


def examples_of(prog: str) -> str:
    """Command lines of `belljar VERB ACT`; of a verb with acts the first of theirs."""
    name, text = re.escape(prog.removeprefix("belljar ")), (Path(__file__).parent / "examples.txt").read_text()
    parts = re.findall(rf"^\[{name}(?: [^]]+)?\]\n(.*?)\n$", text, re.MULTILINE | re.DOTALL)
    return "".join(f"  {line}\n" for line in "\n".join(parts).splitlines()[:6])


def meant(word: str, words: Iterable[str], before: str = "") -> str:
    """A sentence about the word somebody probably meant; "" where none is near."""
    import difflib

    close = difflib.get_close_matches(word, list(words), n=1)
    return f" Did you mean `{before}{close[0]}`?" if close else ""


@dataclass(frozen=True)
class Verb:
    """What a verb, or an act of one, does and takes."""

    help: str
    run: Act | None = None
    options: str = ""  # a table
    acts: Mapping[str, Verb] = field(default_factory=dict)
    needs_runtime: bool = True  # False: it works though everything else is broken, and gets None
    usage: str = ""


def acts(table: str, functions: Mapping[str, Any], *, needs_runtime: bool = True, **shared: str) -> dict[str, Verb]:
    """Verbs, or the acts of one. *functions*: of its module; that of an act has its name, or its name and `_`. *shared*: rows that
    several of them have."""
    verbs = {}
    for part in re.split(r"^\s*# ", _joined(table), flags=re.MULTILINE)[1:]:
        head, *rows = part.splitlines()
        words, _, help = head.partition(" | ")
        name, *more = words.split(" +")
        act = functions.get(f"{name}_") or functions[name.replace("-", "_")]
        usage = "\n       ".join(row.strip()[2:] for row in rows if row.strip().startswith("$ "))
        rows = [row for row in rows if not row.strip().startswith("$ ")]
        options = "\n".join((*rows, *({"format": FORMAT, **shared}[word] for word in more)))
        verbs[name] = Verb(help, act, options, needs_runtime=needs_runtime, usage=usage)
    return verbs


def _joined(table: str) -> str:
    """With each row on a line of its own."""
    return re.sub(r"\n\s*\|(?= )", "", table)


def add(parser: Parser, table: str) -> None:
    below: Any = parser
    choice: Any = None
    for row in _joined(table).splitlines():
        if not (row := row.strip()):
            continue
        if row.startswith("["):
            below = parser.add_argument_group(row.strip("[]"))
            continue
        left, _, help = row.partition(" | ")
        if left.startswith("-- "):
            parser.is_cut = True
            continue
        names, argument = _argument(left.split())
        if left.startswith("/ "):
            choice = choice or parser.add_mutually_exclusive_group(required=argument.pop("required", False))
        (choice if left.startswith("/ ") else below).add_argument(*names, help=help or argparse.SUPPRESS, **argument)


def _argument(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Names, and argparse's keywords."""
    names, argument = list[str](), dict[str, Any]()
    for word in words:
        match word[0]:
            case "-":
                names.append(word)
            case "@":
                argument["dest"] = word[1:]
            case "=":
                argument["default"] = word[1:]
            case "{" if word[1].isupper():
                members = {member.value: member for member in getattr(model, word[1:-1])}
                argument |= {"choices": [*members], "type": lambda text, known=members: known.get(text, text)}
            case "{":
                argument["choices"] = word[1:-1].split(",")
            case "!":
                argument["required"] = True
            case "*" | "+" | "?" | ".":
                argument["nargs"] = word
            case "/":
                pass
            case _:
                argument |= {"metavar": word, "type": TYPES.get(word, str)}
    if argument.get("nargs") == "*":
        argument["default"] = []
    if not names:
        names = [argument.pop("dest", str(argument.get("metavar", "")).lower())]
    elif not argument.keys() & {"metavar", "choices"}:
        argument |= (
            {"action": "store_const", "const": names[-1][2:]} if "dest" in argument else {"action": "store_true"}
        )
    elif argument.get("nargs") == "*":
        argument |= {"nargs": None, "action": "append"}
    elif argument.get("nargs") == "?":
        argument["const"] = False
    return names, argument


def value_of(kind: str) -> Callable[[str], Any]:
    """Reads a value as `belljar.host.values` does, which most command lines do not need."""

    def read(text: str) -> Any:
        from belljar.host import values

        return getattr(values, kind)(text)

    return read


def as_path(text: str) -> Path:
    if not text:
        raise ValueError("the path is empty")
    return Path(text)


def as_moment(text: str) -> float:
    """Seconds since the epoch: a time of the next 24 hours, a date and time, or +DURATION."""
    from datetime import datetime, timedelta

    if text.startswith("+"):
        return time.time() + float(value_of("duration")(text[1:]))
    now = datetime.now()
    try:
        if "T" in text or " " in text or text.count("-") == 2:
            return datetime.fromisoformat(text).timestamp()
        moment = datetime.combine(now.date(), datetime.strptime(text, "%H:%M").time())
        return (moment if moment > now else moment + timedelta(days=1)).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(f"{text}: not a moment such as 18:30, 2026-12-24T18:00 or +45m") from None


def as_month(text: str) -> str:
    if re.fullmatch(r"[0-9]{4}(0[1-9]|1[0-2])", text):
        return text
    raise ValueError(f"{text[:80]}: not a month such as 202611")


def as_whole(text: str) -> int:
    with suppress(ValueError):
        return int(text)
    raise ValueError(f"{text[:80]}: not a whole number")


def after_dashes(args: Args) -> list[str]:
    """The words of a verb's command: argparse takes the `--` behind a parameter away, and leaves one that stands behind it."""
    words: list[str] = args.command
    return words[1:] if words[:1] == ["--"] else words


def state_folder(args: Args, runtime: Any, name: str) -> Path:
    """Where a service of this host keeps its state, by --state."""
    folder: Path = args.state or runtime.folders.store / name
    return folder


TYPES: Mapping[str, Callable[[str], object]] = {
    "TIME": value_of("duration"), "SIZE": value_of("size"), "MOMENT": as_moment, "YYYYMM": as_month, "N": as_whole,
    **dict.fromkeys(("FILE", "DIR", "FILE|DIR", "DIR|FILE", "SOCKET"), as_path),
}  # fmt: skip
FORMAT = "--format {table,json} =table | a table for people (the default), or JSON for programs"
MACHINE = "ID @machine | the machine's ID or the beginning of it, its name, or its batch job (slurm:4711); as root also USER/ID"
MACHINES = MACHINE.replace("@machine", "+ @machines")
