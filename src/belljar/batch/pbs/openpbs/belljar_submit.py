# ruff: noqa: UP031, F821 - for Python 3.5; judge.py and sizes.py stand before it
# mypy: ignore-errors
"""belljar's hook on the server of an OpenPBS site: refuses at qsub and qalter what could not run on a node.

    queuejob     a job is submitted
    modifyjob    what it asks for is changed

`belljar batch install openpbs` puts judge.py, by which nodes judge too, and sizes.py before it and imports the three as one
file; its settings are the JSON file of `import hook ... application/x-config`.
Python 3.5 or later, standard library and PBS's own module. The node looks again at all of it.
"""

import grp
import json
import os
import pwd
import re

import pbs

# Hooks on nodes get arguments line by line, and give them back without blanks at the ends.
ARGUMENT = re.compile(r"<jsdl-hpcpa:Argument>([^<]*)</jsdl-hpcpa:Argument>")


def settings():
    with open(pbs.hook_config_filename) as file:
        return json.load(file)


def is_harmed(word):
    return not word or word != word.strip() or re.search(r"[\x00-\x1f\x7f]", word)


def queue_of(event, job):
    """The queue by name; the server's default where none was asked for."""
    for known in (job, getattr(event, "job_o", None)):
        queue = getattr(known, "queue", None)
        name = str(getattr(queue, "name", queue) or "")
        if name:
            return name
    return str(pbs.server().default_queue or "")


def groups_of(user):
    try:
        entry = pwd.getpwnam(user)
        return [grp.getgrgid(gid).gr_name for gid in os.getgrouplist(user, entry.pw_gid)]
    except (KeyError, OSError):
        return []


def check_known(image, config):
    """The image must be in the store, where this host sees that."""
    try:
        known = sorted(os.listdir(os.path.join(config["store"], "images", "names")))
    except OSError:
        return
    if known and image not in known and not REFERENCE.match(image) and not re.match(r"[0-9a-f]{8,64}\Z", image):
        raise Refused("image %s: there is none of this name; there are: %s" % (image, ", ".join(known[:20])))


def least_disk(image, config):
    """Bytes of the image's own disk; 0 where this host does not see it, or a scratch disk has the size that is asked for."""
    try:
        with open(os.path.join(config["store"], "images", "names", image, "manifest.json")) as file:
            return 0 if config["scratch"] else int(json.load(file)["virtual_size"])
    except (OSError, ValueError, KeyError):
        return 0


def check_chunks(job, image, config):
    """For each chunk: a machine is made on one node."""
    resources = job.Resource_List
    disk, least = size(asked(job, "vm_disk", resources["select"])), least_disk(image, config)
    if disk and disk < least:
        words = "%d MiB of disk: the image %s needs at least %d"
        raise Refused(words % (disk >> 20, image, -(-least >> 20)))
    wide = str(resources["ngpus"] or "") if "ngpus" in resources else ""  # it is there only where a site has defined it
    for chunk in chunks(resources["select"]):
        cpus = chunk.get("ncpus") or str(resources["ncpus"] or "")
        memory = size(chunk.get("mem") or str(resources["mem"] or ""))
        gpus = (chunk.get("ngpus") or wide).strip("0")
        cpus = int(cpus) if cpus.isdigit() else None
        check_sizes({"cpus": cpus, "memory": memory, "disk": disk, "gpus": gpus}, config)


def check(event, config):
    job = event.job
    is_new = event.type == pbs.QUEUEJOB
    if is_new and (not job.Variable_List or (job.executable and not job.Submit_arguments)):
        # Every qsub sends both: PBS could not read them, and would queue any such job without them.
        raise Refused("a variable or an argument of this job is not UTF-8, and PBS would lose it; submit it without")
    if is_new and any(map(is_harmed, ARGUMENT.findall(str(job.argument_list or "")))):
        words = "an argument of this job is empty, or has a blank at an end or a line break"
        raise Refused(words + ", and PBS would lose it; use a script")
    own = asked(job, "vm_image", job.Resource_List["select"])
    if not is_new and not own:
        return
    queue, user = queue_of(event, job), str(event.requestor)
    image = chosen(own, queue, config)
    if image:
        check_name(image)
        check_known(image, config)
        check_allowed(image, user, groups_of(user), queue, config)
        check_chunks(job, image, config)


def main():
    event = pbs.event()
    try:
        check(event, settings())
    except Refused as exc:
        event.reject("belljar: " + ". ".join(exc.args))
    except Exception as exc:  # SystemExit, by which accept and reject leave, is none; the node looks again
        pbs.logmsg(pbs.LOG_ERROR, "belljar: %s: %s" % (type(exc).__name__, exc))
    event.accept()


main()
