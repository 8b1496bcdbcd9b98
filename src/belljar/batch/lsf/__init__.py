"""LSF 10.1."""

from belljar.batch import System

SYSTEM = System(__name__, "LSF", hooks={"esub": "hooks:run"}, untried="never met the real one")
