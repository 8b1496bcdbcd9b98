# mypy: ignore-errors
"""belljar's hook for worker nodes on demand (`execjob_begin`): gives back what comes to a bait, once `belljar bait run` has it held; and lets
nobody's jobs into a machine but its own user's. Its settings are the JSON file of `import hook ... application/x-config`:

    {"baits": ["wn01"], "arrive": ["/usr/local/bin/belljar", "bait", "arrive"]}

Python 3.5 or later, standard library and PBS's own module. Nothing ever runs on a bait: without an answer it is taken offline.
"""

import json
import os
import subprocess

import pbs

OWNER = "/run/belljar/owner"  # in a machine that has joined
TIMEOUT = 60  # seconds; the hook's own alarm is to be longer


def main():
    event = pbs.event()
    job = event.job
    if os.path.exists(OWNER):
        with open(OWNER) as file:
            owner = file.read().strip()
        if owner and owner != str(job.euser):
            event.reject("belljar: this node is for jobs of another user")
        return
    with open(pbs.hook_config_filename) as file:
        config = json.load(file)
    node = pbs.get_local_nodename()
    if node not in config["baits"]:
        return
    try:
        words = [*config["arrive"], str(job.id).partition(".")[0], "--timeout", str(TIMEOUT - 10)]
        why = (
            ""
            if subprocess.call(words, stdin=subprocess.DEVNULL, timeout=TIMEOUT) == 0
            else "it did not take the job back"
        )
    except (OSError, subprocess.SubprocessError) as exc:
        why = str(exc)
    if why:
        for name in event.vnode_list:
            event.vnode_list[name].state = pbs.ND_OFFLINE
            event.vnode_list[name].comment = "belljar: " + why
    event.reject("belljar: " + (why or "it gets a machine of its own"))


main()
