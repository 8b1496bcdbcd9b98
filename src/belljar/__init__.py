"""belljar runs every batch job in its own fresh virtual machine."""

import _signal
import sys

if "".join(sys.argv[:1]).endswith("/belljar") and _signal.getsignal(2) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # until a verb begins, Ctrl-C ends us without Python's traceback

from belljar import modules

__version__ = "0.1.0"
modules.use()
