"""Carries out one task in its machine. The guest's own Python runs it, sent there as text: it imports the standard library alone,
and any Python 3 understands it far enough to say which one it is.

The file of a task holds two pickles: the version of Python that packed it with the code of cloudpickle, then function, arguments
and keyword arguments. That of a result, too: how the task ended with a text, then what was returned or raised.
"""

import marshal
import os
import pickle
import sys

RETURNED, RAISED, OTHER_PYTHON = "returned", "raised", "other-python"
OLDEST = 2  # the protocol of what every Python 3 is to read

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class Carried:
    """Imports the modules whose code came with the task."""

    def __init__(self, code: "dict[str, bytes]") -> None:
        self.code = code

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        kind = type(sys.__spec__)
        return kind(name, self, is_package=name == "cloudpickle") if name in self.code else None  # type: ignore[arg-type]

    def create_module(self, spec: object) -> None:
        return None

    def exec_module(self, module: "ModuleType") -> None:
        exec(marshal.loads(self.code[module.__name__]), module.__dict__)


def main(task: str, result: str) -> None:
    """Carry out the task of this file, and leave its result in that one."""
    with open(task, "rb") as packed:
        python, code = pickle.load(packed)
        if python != tuple(sys.version_info[:2]):
            with open(result, "wb") as file:
                pickle.dump((OTHER_PYTHON, "%d.%d" % sys.version_info[:2]), file, OLDEST)  # noqa: UP031
            return
        sys.meta_path.insert(0, Carried(code))
        try:
            function, args, kwargs = pickle.load(packed)
            put(result, RETURNED, "", function(*args, **kwargs))
        except BaseException as error:  # whatever it is, who asked gets it
            import traceback

            ours = error.__traceback__.tb_next if error.__traceback__ else None
            text = "".join(traceback.format_exception(type(error), error, ours))
            put(result, RAISED, text, error if can_travel(error) else None)


def put(result: str, ended: str, text: str, value: object) -> None:
    import cloudpickle

    with open(result, "wb") as file:
        pickle.dump((ended, text), file, OLDEST)
        cloudpickle.dump(value, file)


def can_travel(error: BaseException) -> bool:
    """Can it be pickled, and made again?"""
    import cloudpickle

    try:
        pickle.loads(cloudpickle.dumps(error))
        return True
    except Exception:
        return False


def leave() -> None:
    """End without the interpreter's own farewell, which takes longer than a short task: everything goes with the machine."""
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105
            stream.flush()
        except (AttributeError, OSError, ValueError):  # the task has closed it
            pass
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
