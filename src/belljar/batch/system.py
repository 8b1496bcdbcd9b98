"""What a batch system is here: one folder that exports one `SYSTEM`, and is found by its folder.

__init__.py   SYSTEM, a `System`
dialect.py    DIALECT: what it says to a job, and how it is answered (batch/job/terms.py)
site.py       SITE: what a site installs, and whether it is there (batch/install/pieces.py)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, cast

from belljar.errors import BadOption
from belljar.records import dataclass, field

if TYPE_CHECKING:
    from belljar.batch import Settings
    from belljar.batch.install.commands import Client
    from belljar.batch.install.pieces import SiteOfSystem
    from belljar.batch.job.policy import Asker
    from belljar.batch.job.terms import Dialect


@dataclass(frozen=True)
class Call:
    """A program of a system's own, called through `belljar internal hook`. What it may ask for is looked up when it does."""

    name: str
    words: tuple[str, ...]
    env: Mapping[str, str]
    settings: Callable[[], Settings]  # raises BadSetting
    asker: Callable[[], Asker]  # who runs this process
    client: Callable[[], Client]
    images: Callable[[], Collection[str] | None]  # names of the site's; None where its store cannot be seen from here


@dataclass(frozen=True)
class System:
    """One batch system."""

    package: str  # the folder's own `__name__`
    title: str  # as people write it
    hooks: Mapping[str, str] = field(default_factory=dict)  # besides prolog and epilog: name -> `module:function`
    ends_words: bool = False  # its redirect says nothing to us: all that follows the launcher's name is the job's
    node_variable: str = ""  # by which it tells its hooks its own name for this node
    untried: str = ""  # why it is called experimental

    @property
    def name(self) -> str:
        return self.package.rpartition(".")[2]

    @property
    def dialect(self) -> Dialect:
        return cast("Dialect", import_module(f"{self.package}.dialect").DIALECT)

    @property
    def site(self) -> SiteOfSystem:
        return cast("SiteOfSystem", import_module(f"{self.package}.site").SITE)

    def hook(self, name: str) -> Callable[[Call], int]:
        """Raises BadOption for one it does not have."""
        if name not in self.hooks:
            raise BadOption(f"{self.name}: has no hook {name!r}", hint=f"It has: {', '.join(self.hooks) or 'none'}.")
        module, _, function = self.hooks[name].partition(":")
        return cast("Callable[[Call], int]", getattr(import_module(f"{self.package}.{module}"), function))
