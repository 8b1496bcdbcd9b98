"""Slurm's accounting as a site has it: slurmdbd, which runs as SlurmUser, with a private MariaDB below it. Missing packages are installed."""

from __future__ import annotations

import os
import shutil
import subprocess

from tests.batch.lab.slurm import Slurm, daemon, free_port, install

PROGRAMS = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server-core", "mariadb": "mariadb-client-core"}
SECRET = "lab"  # of a server that only this host reaches, for as long as a test lasts
GRANTS = f"""CREATE DATABASE slurm_acct_db;
CREATE USER slurm@'127.0.0.1' IDENTIFIED BY '{SECRET}';
GRANT ALL ON slurm_acct_db.* TO slurm@'127.0.0.1';"""


class Accounting:
    """Of one lab, which ends it."""

    def __init__(self, lab: Slurm) -> None:
        self.lab, self.folder, self.ports = lab, lab.folder / "accounting", (free_port(), free_port())
        host = os.uname().nodename.partition(".")[0]
        self.settings = {
            "AccountingStorageType": "accounting_storage/slurmdbd", "AccountingStorageHost": host,
            "AccountingStoragePort": str(self.ports[1]),
            "AccountingStoragePass": f"{lab.folder}/munge/run/munge.socket", "JobAcctGatherType": "jobacct_gather/linux",
        }  # fmt: skip

    def up(self) -> None:
        install(PROGRAMS)
        owner, run = self.lab.settings["SlurmUser"], self.lab.folder / "run"
        self.folder.mkdir(mode=0o755)
        shutil.chown(self.folder, owner)
        common = (f"--datadir={self.folder}/data", f"--user={owner}")
        made = (
            "mariadb-install-db",
            "--no-defaults",
            *common,
            "--auth-root-authentication-method=socket",
            "--skip-test-db",
        )
        subprocess.run(made, env=self.lab.env, check=True, capture_output=True, timeout=120)
        listening = (
            "--bind-address=127.0.0.1",
            f"--port={self.ports[0]}",
            f"--socket={self.folder}/sock",
            "--skip-name-resolve",
        )
        serving = ("mariadbd", "--no-defaults", *common, *listening, f"--pid-file={run}/mariadbd.pid")
        with (self.lab.folder / "log/mariadbd.log").open("wb") as log:
            server = subprocess.Popen(
                (*self.lab.inside, *serving), env=self.lab.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.lab.ending.append(server)  # which ends by its pid file
        ask = ("mariadb", "--no-defaults", f"--socket={self.folder}/sock", "--user=root", "-e")
        self.lab.until(lambda: self.lab.run(*ask, "SELECT 1", check=False).returncode == 0, "MariaDB answers")
        self.lab.run(*ask, GRANTS)
        self._slurmdbd(owner)
        self.lab.run("sacctmgr", "-i", "add", "cluster", self.lab.settings["ClusterName"])

    def _slurmdbd(self, owner: str) -> None:
        conf, folder = self.lab.etc / "slurmdbd.conf", self.lab.folder
        conf.touch(0o600)
        conf.write_text(
            f"AuthType=auth/munge\nAuthInfo=socket={folder}/munge/run/munge.socket\nDbdHost={self.settings['AccountingStorageHost']}\n"
            f"DbdPort={self.ports[1]}\nSlurmUser={owner}\nPidFile={folder}/run/slurmdbd.pid\nLogFile={folder}/log/slurmdbd.log\n"
            f"StorageType=accounting_storage/mysql\nStorageHost=127.0.0.1\nStoragePort={self.ports[0]}\nStorageUser=slurm\n"
            f"StoragePass={SECRET}\nStorageLoc=slurm_acct_db\n"
        )
        shutil.chown(conf, owner)
        daemon((*self.lab.inside, "slurmdbd"), self.lab.env)
        self.lab.until(
            lambda: self.lab.run("sacctmgr", "-n", "show", "cluster", check=False).returncode == 0, "slurmdbd answers"
        )
