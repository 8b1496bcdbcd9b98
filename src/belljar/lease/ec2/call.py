"""One request that is known to be its owner's: what every action is given, and what they share (ids, lists, pages, tags, DryRun)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from belljar.lease.belongings import MOST_TAGS, SERVICES
from belljar.lease.desk import Owner
from belljar.lease.ec2.filters import passing
from belljar.lease.ec2.model import Shape, model
from belljar.lease.ec2.office import Office
from belljar.lease.ec2.refusals import Refused
from belljar.lease.store import Book
from belljar.records import dataclass

Answer = Mapping[str, Any]
T = TypeVar("T")
Page = tuple[list[tuple[T, Answer]], str | None]  # things with their answers, and the token for the next page
SMALLEST_PAGE, LARGEST_PAGE = 5, 1000
SMALLER = {"DescribeImages": 1}  # pages
LONGEST_KEY, LONGEST_VALUE = 128, 256  # characters of a tag
RESERVED = ("aws:", SERVICES)
DURATION = "lease:duration"  # the one that an owner may set: for how long, when instances are launched
HEX_ID = r"(?:[0-9a-f]{8}|[0-9a-f]{17})"


@dataclass(frozen=True)
class Call:
    """An action that an owner asked for, with its parameters under the names of EC2's model."""

    office: Office
    owner: Owner
    action: str
    asked: Mapping[str, Any]
    secret: bytes  # what tokens of pages are sealed with
    endpoint: str  # host and port, as the client named them
    now: float

    @property
    def filters(self) -> Sequence[Mapping[str, Any]]:
        return self.asked.get("Filters") or ()

    def check_dry(self) -> None:
        """To be called when all is checked and nothing is done yet, or within the transaction that does it."""
        if self.asked.get("DryRun"):
            raise Refused("DryRunOperation", "Request would have succeeded, but DryRun flag is set.")

    def read(self, look: Callable[[Book], T]) -> T:
        return self.office.leases.store.read(look)

    def write(self, change: Callable[[Book], object]) -> None:
        """In one transaction, of which nothing is left where it was to be dry."""

        def whole(book: Book) -> None:
            change(book)
            self.check_dry()

        self.office.leases.store.write(whole)

    # -- lists ---------------------------------------------------------------------------------------------------------

    def listing(self, member: str, items: Iterable[Answer], *keys: str, ids: str = "") -> Answer:
        """The answer whose *member* lists those of *items* that pass the filters, by *keys*, a page of them."""
        shape = model().output(self.action).members
        order = lambda item: [item[key] for key in keys]  # noqa: E731
        page, after = self.page(items, order, lambda item: item, shape[member].member, ids=ids)
        return {member: [item for _, item in page]} | ({"NextToken": after} if "NextToken" in shape else {})

    def page(
        self, items: Iterable[T], order: Callable[[T], list[Any]], show: Callable[[T], Answer], shape: Shape, *, ids: str = "",
        **also: Callable[[T], str],
    ) -> Page[T]:  # fmt: skip
        """What of *items* passes the filters (see `filters.passing`) and is on this page. A token says after what it goes on, so nothing is
        lost or seen twice when items come and go meanwhile."""
        most = self.asked.get("MaxResults") or LARGEST_PAGE
        least = SMALLER.get(self.action, SMALLEST_PAGE)
        if not least <= most <= LARGEST_PAGE:
            raise Refused("InvalidParameterValue", f"MaxResults is {least} to {LARGEST_PAGE}, not {most}")
        if ids and self.asked.get(ids) and "MaxResults" in self.asked:
            raise Refused("InvalidParameterCombination", f"MaxResults and {ids} exclude each other")
        filters = model().input(self.action).members.get("Filters")
        passes = passing(self.filters, shape, also, filters.documentation if filters else "")
        token = self.asked.get("NextToken")
        after = self._opened(token) if token else None
        rest = (item for item in sorted(items, key=order) if after is None or order(item) > after)
        pairs = list(islice((pair for pair in ((item, show(item)) for item in rest) if passes(*pair)), most + 1))
        return pairs[:most], self._sealed(order(pairs[most - 1][0])) if len(pairs) > most else None

    def _seal(self, text: bytes) -> bytes:
        """Bound to the client and to what it asks for."""
        rest = {name: value for name, value in self.asked.items() if name not in ("NextToken", "MaxResults")}
        about = json.dumps([self.owner.name, self.action, rest], sort_keys=True, default=str).encode()
        return hmac.digest(self.secret, b"page\n" + hashlib.sha256(about).digest() + text, "sha256")

    def _sealed(self, after: list[Any]) -> str:
        text = json.dumps(after).encode()
        return base64.urlsafe_b64encode(self._seal(text) + text).decode()

    def _opened(self, token: str) -> list[Any]:
        try:
            data = base64.b64decode(token, b"-_", validate=True)
        except ValueError:
            data = b""
        if not hmac.compare_digest(data[:32], self._seal(data[32:])):
            raise Refused("InvalidPaginationToken", "NextToken is none of ours, or belongs to another request")
        return list(json.loads(data[32:]))

    # -- what is named -------------------------------------------------------------------------------------------------

    def of_ids(self, name: str, known: Mapping[str, Any], prefix: str, code: str) -> list[Any]:
        """The things with the ids in that parameter, each once; all or none. *code*: as in InvalidInstanceID."""
        for id in self._given(name):
            if not re.fullmatch(f"{prefix}-{HEX_ID}", id):
                raise Refused(f"{code}.Malformed", f'Invalid id: "{id[:60]}"')
        return self.of_names(name, known, f"{code}.NotFound")

    def of_names(self, name: str, known: Mapping[str, Any], code: str = "InvalidParameterValue") -> list[Any]:
        """As `of_ids`, of whatever form."""
        names = self._given(name)
        if missing := [given[:60] for given in names if given not in known]:
            raise Refused(code, f"{name}: these do not exist: {', '.join(missing[:10])}")
        return [known[given] for given in names]

    def _given(self, name: str) -> list[str]:
        given = self.asked.get(name) or ()
        return [given] if isinstance(given, str) else list(dict.fromkeys(given))


# -- tags --------------------------------------------------------------------------------------------------------------


def tags_of(items: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The tags that an owner gives. Raises Refused."""
    tags: dict[str, str] = {}
    for item in items:
        if tags.setdefault(key := item.get("Key", ""), value := item.get("Value", "")) != value:
            raise Refused("InvalidParameterValue", f"Duplicate tag key '{key[:LONGEST_KEY]}' specified.")
    if len(tags) > MOST_TAGS:
        raise Refused("TagLimitExceeded", f"a resource has at most {MOST_TAGS} tags")
    for key, value in tags.items():
        if not 1 <= len(key) <= LONGEST_KEY or len(value) > LONGEST_VALUE:
            raise Refused("InvalidParameterValue", f"A tag: 1 to {LONGEST_KEY} characters, at most {LONGEST_VALUE}")
        if key.startswith(RESERVED) and key != DURATION:
            raise Refused("InvalidParameterValue", f"Tag keys starting with {' or '.join(RESERVED)} are reserved")
    return tags


def specified(call: Call, *kinds: str) -> dict[str, str]:
    """The tags of TagSpecifications. All are for what the action makes: of the same name, that of the kind which is named first here."""
    by_kind = dict.fromkeys(kinds, ())
    for spec in call.asked.get("TagSpecifications") or ():
        if spec.get("ResourceType") not in kinds:
            raise Refused("InvalidParameterValue", f"TagSpecification.ResourceType is {' or '.join(kinds)} here")
        by_kind[spec["ResourceType"]] += tuple(spec.get("Tags") or ())
    merged = {key: value for kind in reversed(kinds) for key, value in tags_of(by_kind[kind]).items()}
    return tags_of(shown(merged.items()))


def shown(tags: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags]
