# ruff: noqa: UP031 - for Python 3.5
# mypy: ignore-errors
"""belljar's hook on the server of an OpenPBS site: refuses at qsub and qalter what could not run on a node.

    queuejob     a job is submitted
    modifyjob    what it asks for is changed

Imported by `belljar batch install openpbs` as it is; its settings are the JSON file of `import hook ... application/x-config`.
Python 3.5 or later, standard library and PBS's own module. The node looks again at all of it.
"""

import fnmatch
import grp
import json
import os
import pwd
import re

import pbs

MIB = 1 << 20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
SIZE = re.compile(r"([0-9]{1,15})([kmgtp]?)([bw]?)\Z", re.IGNORECASE)
POWERS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40, "p": 50}


def settings():
    with open(pbs.hook_config_filename) as file:
        return json.load(file)


def refuse(event, text):
    event.reject("belljar: " + text)


def chunks(job):
    """The resources of each chunk of the selection, by name; one that counts for the whole job where there is none."""
    found = []
    for text in str(job.Resource_List["select"] or "").split("+"):
        words = [word.partition("=") for word in text.split(":") if "=" in word]
        found.append(dict((name, value.strip("\"'")) for name, _, value in words))
    return found


def asked(job, name):
    value = job.Resource_List[name]
    return str(value) if value else chunks(job)[0].get(name, "")


def queue_of(event, job):
    """The queue by name; the server's default where none was asked for."""
    for one in (job, getattr(event, "job_o", None)):
        queue = getattr(one, "queue", None) if one is not None else None
        name = str(getattr(queue, "name", queue) or "")
        if name:
            return name
    return str(pbs.server().default_queue or "")


def size(text):
    match = SIZE.match(text or "")
    if not match:
        return None
    return int(match.group(1)) * (8 if match.group(3).lower() == "w" else 1) << POWERS[match.group(2).lower()]


def groups_of(user):
    try:
        entry = pwd.getpwnam(user)
        return [grp.getgrgid(gid).gr_name for gid in os.getgrouplist(user, entry.pw_gid)]
    except (KeyError, OSError):
        return []


def known_images(config):
    """The names in the store where this host sees it, else those it had when the hook was installed; none: unknown."""
    try:
        return sorted(os.listdir(os.path.join(config["store"], "images", "names")))
    except OSError:
        return config.get("images") or []


def check_image(event, image, user, queue, config):
    if not NAME.match(image):
        refuse(event, "image %r: not a name of an image" % image[:60])
    known = known_images(config)
    if known and image not in known and not re.match(r"[0-9a-f]{8,64}\Z", image):
        refuse(event, "image %s: there is none of this name; there are: %s" % (image, ", ".join(known[:20])))
    groups, offered = groups_of(user), []
    for rule in config.get("allow", ["* *"]):
        who, _, pattern = rule.partition(" ")
        kind, _, name = who.partition(":")
        is_theirs = (
            who == "*"
            or (kind == "user" and name == user)
            or (kind == "group" and name in groups)
            or (kind == "queue" and name == queue)
        )
        if is_theirs and fnmatch.fnmatchcase(image, pattern.strip()):
            return
        if is_theirs:
            offered.append(pattern.strip())
    allowed = "allowed are: %s" % ", ".join(offered) if offered else "no image is allowed there"
    refuse(event, "image %s: not allowed for %s in queue %s; %s" % (image, user, queue, allowed))


def check_sizes(event, job, config):
    """Of each chunk: a machine is made on one node."""
    for one in chunks(job):
        cpus = one.get("ncpus") or str(job.Resource_List["ncpus"] or "")
        memory = size(one.get("mem") or str(job.Resource_List["mem"] or ""))
        if cpus.isdigit() and config.get("max_cpus") and int(cpus) > config["max_cpus"]:
            refuse(event, "%s cpus: a job in a machine may have at most %d here" % (cpus, config["max_cpus"]))
        if memory and config.get("max_memory") and memory > config["max_memory"]:
            most = config["max_memory"] // MIB
            refuse(event, "%d MiB of memory: a job in a machine may have at most %d here" % (memory // MIB, most))
        if memory and memory < config.get("least_memory", 0):
            least = -(-config["least_memory"] // MIB)
            refuse(event, "%d MiB of memory: a job in a machine needs at least %d" % (memory // MIB, least))
    disk = size(asked(job, "vm_disk"))
    if disk and config.get("max_disk") and disk > config["max_disk"]:
        most = config["max_disk"] // MIB
        refuse(event, "%d MiB of disk: a job in a machine may have at most %d here" % (disk // MIB, most))


def check(event, config):
    job = event.job
    is_new = event.type == pbs.QUEUEJOB
    if is_new and (not job.Variable_List or (job.executable and not job.Submit_arguments)):
        # Every qsub sends both. PBS could not read them, and would queue the job without them: with any hook, and for
        # any job.
        refuse(event, "a variable or an argument of this job is not UTF-8, and PBS would lose it; submit it without")
    own = asked(job, "vm_image")
    if not is_new and not own:
        return
    queue, user = queue_of(event, job), str(event.requestor)
    image = own or config.get("queue_images", {}).get(queue, config.get("default_image", ""))
    if not image:
        return
    check_image(event, image, user, queue, config)
    check_sizes(event, job, config)


def main():
    event = pbs.event()
    try:
        check(event, settings())
    except Exception as exc:  # SystemExit, by which accept and reject leave, is none; the node looks again
        pbs.logmsg(pbs.LOG_ERROR, "belljar: %s: %s" % (type(exc).__name__, exc))
    event.accept()


main()
