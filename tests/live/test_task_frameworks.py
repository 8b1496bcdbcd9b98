"""Dask, Parsl and submitit with machines, by our examples: each runs the first pages of its own documentation, in an environment of its own."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live.conftest import ROOT, Belljar

LONGEST = 500
PACKAGES = ("cloudpickle", "distributed", "parsl", "submitit")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * LONGEST),
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the default image has Python 3.11"),
]

# https://distributed.dask.org/en/stable/quickstart.html
DASK = """
import os, sys

def square(x): return x ** 2
def neg(x): return -x
def where(n): return os.uname().nodename

if __name__ == "__main__":
    {page}
    with MachineCluster(2, host=sys.argv[1], memory="512M") as cluster, Client(cluster) as client:
        client.wait_for_workers(2, timeout=300)
        A = client.map(square, range(10))
        B = client.map(neg, A)
        print(client.submit(sum, B).result(), client.gather(A) == [n * n for n in range(10)])
        places = set(client.run(os.uname).values())
        print(len({place.nodename for place in places}))
        far = client.submit(bytes, 3 << 20, workers=[0], pure=False)
        print(client.submit(len, far, workers=[1]).result())  # from one machine to the other
        cluster.scale(1)
"""
# https://parsl.readthedocs.io/en/stable/1-parsl-introduction.html
PARSL = """
import os, sys
{page}
from parsl import python_app

@python_app
def pi(num_points):
    from random import random
    inside = 0
    for i in range(num_points):
        x, y = random(), random()
        if (x**2 + y**2) < 1:
            inside += 1
    return (inside * 4 / num_points)

@python_app
def mean(a, b, c):
    return (a + b + c) / 3

@python_app
def where():
    import os
    return os.uname().nodename

a, b, c = pi(10**4), pi(10**4), pi(10**4)
print(3 < mean(a, b, c).result() < 3.3, where().result() != os.uname().nodename)
parsl.dfk().cleanup()
"""
# https://github.com/facebookincubator/submitit/blob/main/README.md
SUBMITIT = """
import os, sys, submitit
from submitit_jobs import python

def add(a, b):
    return a + b

executor = submitit.LocalExecutor(sys.argv[1], python=python(sys.argv[1], "--memory", "512M"))
executor.update_parameters(timeout_min=5)
jobs = executor.map_array(add, [1, 2], [10, 20])
place = executor.submit(os.uname)
print(executor.submit(add, 5, 7).result(), [job.result() for job in jobs], place.result().nodename != os.uname().nodename)
try:
    executor.submit(add, 5, "7").result()
except submitit.core.utils.FailedJobError as error:
    print("TypeError: unsupported operand" in str(error))
"""


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with these frameworks and belljar."""
    folder = tmp_path_factory.mktemp("frameworks") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=LONGEST)
    subprocess.run([folder / "bin/pip", "install", "-qq", *PACKAGES], check=True, timeout=LONGEST)
    (folder / "lib/python3.11/site-packages/belljar.pth").write_text(f"{ROOT / 'src'}\n{ROOT / 'examples/executor'}\n")
    for one in (folder, *folder.parents[:3]):
        one.chmod(0o755)
    return folder / "bin/python"


def block(word: str) -> str:
    """The example of the page that has this word."""
    blocks = re.findall("```python\n(.*?)\n```", (ROOT / "docs/jobs/executor.md").read_text(), re.DOTALL)
    return next(text for text in blocks if word in text)


@pytest.fixture
def address() -> Iterator[str]:
    """The one by which this host reaches others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this host has no address but its loopback's")
        yield probe.getsockname()[0]


def output(belljar: Belljar, interpreter: Path, folder: Path, code: str, *words: str, allow: str = "") -> str:
    program = folder / "program.py"
    program.write_text(code)
    path = f"{interpreter.parent}:{belljar.env['PATH']}"  # the environment is activated
    env = {**belljar.env, "BELLJAR_NETWORK_ALLOW": allow, "PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [interpreter, program, *words], env=env, cwd=folder, capture_output=True, text=True, timeout=LONGEST, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr + "\n".join(logs(belljar))
    for machine in belljar.json("ps"):  # Parsl does not wait for what it stops
        belljar("wait", machine["id"], "--timeout", "60")
    assert belljar.leftovers() == []
    return done.stdout


def logs(belljar: Belljar) -> Iterator[str]:
    for file in (*belljar.logs.glob("*/std*.log"), *belljar.logs.glob("*/keeper.log")):
        yield f"{file}:\n{file.read_text(errors='replace')[-3000:]}"


def test_dask(belljar: Belljar, interpreter: Path, tmp_path: Path, address: str) -> None:
    code = DASK.replace("{page}", block("MachineCluster").replace("\n", "\n    "))
    assert output(belljar, interpreter, tmp_path, code, address, allow=address) == "32\n-285 True\n2\n3145728\n"


def test_parsl(belljar: Belljar, interpreter: Path, tmp_path: Path, address: str) -> None:
    code = PARSL.replace("{page}", block("MachineLauncher"))
    assert output(belljar, interpreter, tmp_path, code, allow=address) == "True True\n"


def test_submitit(belljar: Belljar, interpreter: Path, tmp_path: Path) -> None:
    said = output(belljar, interpreter, tmp_path, SUBMITIT, str(tmp_path / "jobs"))
    assert said == "12 [11, 22] True\nTrue\n"
    assert os.listdir(tmp_path / "jobs")
