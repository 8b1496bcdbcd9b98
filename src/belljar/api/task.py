"""Carries out one task in its machine. The guest's own Python runs it, sent there as text: it imports the standard library alone,
and little of that, since an emulated guest takes a second to import cloudpickle. Any Python 3 understands it far enough to say
which one it is.

Standard input has two pickles: the version of Python that packed them with the code of cloudpickle's modules and of its loaders, then a function, its arguments
and its keyword arguments. So has the file of the result: how the task ended with a text, then what was returned or raised.
"""

import builtins
import marshal
import os
import sys
import types

try:
    import _pickle as pickle  # without what only its Python version imports
except ImportError:
    import pickle  # type: ignore[no-redef]

RETURNED, RAISED, OTHER_PYTHON = "returned", "raised", "other-python"
MODULES = ("cloudpickle", "cloudpickle.cloudpickle")
KNOWN = ("types", "sys", "__builtins__", "_empty_cell_value")  # to functions of cloudpickle's that come without it
OLDEST = 2  # the protocol of what every Python 3 is to read

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import IO, Any


class Carried:
    """Imports the modules whose code came with the task."""

    def __init__(self, code: "dict[str, bytes]") -> None:
        self.code = code

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        kind = type(sys.__spec__)
        return kind(name, self, is_package=name == "cloudpickle") if name in self.code else None  # type: ignore[arg-type]

    def create_module(self, spec: object) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        exec(marshal.loads(self.code[module.__name__]), module.__dict__)


class Tasks(pickle.Unpickler):
    """Makes functions again by those few of cloudpickle's that came one by one, for the whole takes long to import."""

    def __init__(self, source: "IO[bytes]", loaders: "dict[str, bytes]") -> None:
        super().__init__(source)
        self.known = dict(zip(KNOWN, (types, sys, builtins, object())))  # noqa: B905 - also in an older Python
        for name, code in loaders.items():
            self.known[name] = types.FunctionType(marshal.loads(code), self.known)

    def find_class(self, module: str, name: str) -> "Any":
        return self.known[name] if module in MODULES and name in self.known else super().find_class(module, name)


def main(source: "IO[bytes]", result: str) -> None:
    """Carry out the task that is read there, and leave its result in this file."""
    python, code, loaders = pickle.load(source)
    if python != tuple(sys.version_info[:2]):
        with open(result, "wb") as file:
            pickle.dump((OTHER_PYTHON, "%d.%d" % sys.version_info[:2]), file, OLDEST)  # noqa: UP031
        return
    sys.meta_path.insert(0, Carried(code))
    try:
        function, args, kwargs = Tasks(source, loaders).load()
        put(result, RETURNED, "", dumps(function(*args, **kwargs)))
    except BaseException as error:  # whatever it is, who asked gets it
        import traceback

        ours = error.__traceback__.tb_next if error.__traceback__ else None
        text = "".join(traceback.format_exception(type(error), error, ours))
        try:
            packed = dumps(error)
            pickle.loads(packed)
        except Exception:  # then its text is all there is
            packed = dumps(None)
        put(result, RAISED, text, packed)


def dumps(value: object) -> bytes:
    """Pickled, by cloudpickle only where plain pickle cannot."""
    try:
        return pickle.dumps(value, -1)
    except Exception:
        import cloudpickle

        return cloudpickle.dumps(value)  # type: ignore[no-any-return]


def put(result: str, ended: str, text: str, packed: bytes) -> None:
    with open(result, "wb") as file:
        pickle.dump((ended, text), file, OLDEST)
        file.write(packed)


if __name__ == "__main__":
    main(sys.stdin.buffer, *sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105
            stream.flush()
        except (AttributeError, OSError, ValueError):  # the task has closed it
            pass
    os._exit(0)  # without the interpreter's own farewell, which takes longer than a short task
