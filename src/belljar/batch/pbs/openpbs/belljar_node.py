# ruff: noqa: UP031, B905, F821 - for Python 3.5; judge.py and sizes.py stand before it
# mypy: ignore-errors
"""belljar's hook on the nodes of an OpenPBS site: starts the jobs that are to have a machine through belljar's wrapper.

    execjob_begin        the job arrives: make its folder for notes, call `belljar internal prolog`
    execjob_launch       its program is about to start: start the wrapper instead, which runs it in a machine
    execjob_epilogue     it ended: carry out the wrapper's note (again later, or hold), if there is one
    execjob_end          it is gone: call `belljar internal epilog`, remove the folder for notes
    exechost_startup     pbs_mom starts: end machines whose job is gone
    exechost_periodic    the same, now and then

Imported by `belljar batch install openpbs` behind judge.py and sizes.py; its settings are the JSON file of `import hook ... application/x-config`.
Python 3.5 or later, standard library and PBS's own module. A job that wants no machine is left as it is.
"""

import json
import os
import pwd
import re
import shutil
import stat
import subprocess
import time

import pbs

LARGEST_NOTE = 4096
LONGEST_DELAY = 86400
LONGEST_WHY = 200
COMMAND_TIMEOUT = 20  # seconds; the hook's own alarm is 60
MOST_STARTS = 20  # PBS itself holds a job that was started more often
MARKED = re.compile(rb"^ *Exit_status = -18$", re.MULTILINE)  # JOB_EXEC_HOOK_RERUN
KILLED = "265"  # Exit_status: 256 and the number of KILL


def settings():
    with open(pbs.hook_config_filename) as file:
        return json.load(file)


def image_of(job, config):
    """The image this job is to have, or "" for none. The wrapper judges whether it may have it."""
    own, queue = asked(job, "vm_image", job.schedselect), str(job.queue.name) if job.queue else ""
    return chosen(own, queue, config)


def here(job, name):
    """The sum of a resource over the job's chunks on this node, as text pieces; the first host is this one."""
    hosts = [place.partition("/")[0] for place in str(job.exec_host2 or "").split("+")]
    chunks = re.findall(r"\(([^)]*)\)", str(job.exec_vnode or ""))
    texts = [text for host, text in zip(hosts, chunks) if host == hosts[0]]
    words = [word.partition("=") for text in texts for word in re.split(r"[:+]", text)]
    return [value for key, _, value in words if key == name and value]


def facts_of(job, image, config):
    """What the wrapper cannot know by itself."""
    cpus = [int(number) for number in here(job, "ncpus") if number.isdigit()]
    memory = [size(text) for text in here(job, "mem")]
    attributes = {
        "image": image,
        "queue": str(job.queue.name) if job.queue else "",
        "cpus": sum(cpus),
        "memory": sum(filter(None, memory)) or size(str(job.Resource_List["mem"] or "")),
        "disk": size(asked(job, "vm_disk", job.schedselect)),
        "wall": seconds(str(job.Resource_List["walltime"] or "")),
        "runs": int(job.run_count or 1),
        "grace": whole(job.job_kill_delay),
        "note": os.path.join(folder_of(job, config), "note"),
    }
    return dict((name, value) for name, value in attributes.items() if value)


def whole(value):
    text = str(value or "")
    return int(text) if text.isdigit() else None


def begin(event, config):
    """Refuse what would run outside of its machine; make what the wrapper needs."""
    job = event.job
    image = image_of(job, config)
    if not image or not job.in_ms_mom():
        return
    if not hasattr(event, "vnode_list") or not {"PBS_O_HOST", "PBS_O_PATH"} <= set(job.Variable_List or ()):
        # PBS could not read all of it. It then skips the launch hook, and the job would run on the node itself.
        job.delete()
        event.reject("belljar: a variable or argument of this job is not UTF-8: submit it without, or without an image")
    make_folder(job, config)
    belljar(config, "internal", "prolog", "openpbs", str(job.id), str(job.euser))


def launch(event, config):
    """Put the wrapper in place of the job's first program."""
    job, env = event.job, event.env
    if str(env.get("PBS_TASKNUM")) != "1" or str(env.get("PBS_NODENUM")) != "0":
        return
    image = image_of(job, config)
    if not image:
        return
    if is_marked(job):
        job.run_count = int(job.run_count) - 1  # this start does not count
        job.rerun()
        event.reject("belljar: not started: the server would queue it again, however it ended; next time it will not")
    attributes, program = facts_of(job, image, config), str(event.progname)
    words = [str(word) for word in event.argv]
    if not job.executable:
        attributes["script"] = True
        words = ["-" + os.path.basename(program), *words[1:]]
    text = json.dumps(attributes, separators=(",", ":"), sort_keys=True).replace(" ", "\\u0020")
    event.progname = config["wrapper"]
    event.argv[:] = [os.path.basename(config["wrapper"]), "--facts=" + text, "--", program, *words]


def is_marked(job):
    """Does the server keep, as this job's Exit_status, that a hook gave it back once? Servers of 22.05 and 23.06 do,
    and would queue it again at the end of every later run. A start that the launch hook rejects makes them forget."""
    return int(job.run_count or 1) > 1 and MARKED.search(qstat(job)) is not None


def epilogue(event, config):
    """Give the job back if no machine could be started. The note is the user's: it can only ask for what PBS bounds."""
    job = event.job
    note = read_note(job, config)
    if note is None or (note.get("begun") is True and not may_begin_again(job)):
        return
    runs = int(job.run_count or 1)
    is_last = runs >= max(int(config.get("retries", 3)), 1) or runs >= MOST_STARTS
    why = "".join(c if " " <= c <= "~" and c not in "\"'\\" else "?" for c in str(note.get("why", "")))[:LONGEST_WHY]
    if note.get("verdict") == "hold" or is_last:
        job.Hold_Types = pbs.hold_types("u")
    elif "[" not in str(job.id):  # a subjob that waits for a time is lost, and its array ends without it (23.06)
        job.Execution_Time = time.time() + min(max(whole(note.get("delay")) or 0, 1), LONGEST_DELAY)
    comment(job, why if why.startswith("belljar:") else "belljar: " + why)
    job.rerun()


def may_begin_again(job):
    """Was it not submitted with `-r n`? Only the server tells: pbs_mom does not have that attribute."""
    return re.search(rb"^ *Rerunable = True$", qstat(job), re.MULTILINE) is not None


def qstat(job):
    """What the server says of the job; nothing where it does not answer. Wide: else a line break in a variable would begin a line."""
    return run((os.path.join(pbs.get_pbs_conf()["PBS_EXEC"], "bin/qstat"), "-f", "-w", str(job.id)), 5)


def comment(job, text):
    """Only managers and operators may write a job's comment; root of a node may be neither, and then it has none."""
    pbs.logjobmsg(str(job.id), text)
    run((os.path.join(pbs.get_pbs_conf()["PBS_EXEC"], "bin/qalter"), "-W", "comment=" + text, str(job.id)), 5)


def end(event, config):
    """Nothing of the job stays on this node."""
    job = event.job
    folder = folder_of(job, config)
    if not os.path.isdir(folder):
        return
    # A machine that was killed with its job cannot say so: while a job is launched no process hears the TERM of a qdel.
    killed = ("--killed",) if str(getattr(job, "Exit_status", "")) == KILLED else ()
    belljar(config, "internal", "epilog", "openpbs", str(job.id), str(job.euser), *killed)
    shutil.rmtree(folder, ignore_errors=True)


def tidy(event, config):
    """Machines without a job. The server is asked twice, a while apart, before one is ended."""
    belljar(config, "reap", "--batch", "openpbs")


def folder_of(job, config):
    return os.path.join(config["notes"], re.sub(r"[^A-Za-z0-9.\[\]_-]", "_", str(job.id)))


def make_folder(job, config):
    """Root's folder with the job's own in it. What stands there from a run before is not believed again."""
    folder = folder_of(job, config)
    os.umask(0o022)
    if not os.path.isdir(config["notes"]):
        os.makedirs(config["notes"], 0o755)
    shutil.rmtree(folder, ignore_errors=True)
    entry = pwd.getpwnam(str(job.euser))
    os.mkdir(folder, 0o700)
    os.chown(folder, entry.pw_uid, entry.pw_gid)


def read_note(job, config):
    """The wrapper's note; None where there is none that can be believed."""
    path, flags = os.path.join(folder_of(job, config), "note"), os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with open(os.open(path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != pwd.getpwnam(str(job.euser)).pw_uid:
                return None
            note = json.loads(file.read(LARGEST_NOTE).decode("utf-8"))
    except (OSError, ValueError, KeyError):
        return None
    return note if isinstance(note, dict) and note.get("verdict") in ("requeue", "hold") else None


def belljar(config, *words):
    run((config["belljar"], *words), COMMAND_TIMEOUT)


def run(argv, timeout):
    """What a command prints, run to its end; what goes wrong goes to pbs_mom's log and nowhere else."""
    folder = pbs.get_pbs_conf()["PBS_EXEC"]
    path = folder + "/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    words = ("/usr/bin/env", "PATH=" + path, "PBS_EXEC=" + folder, *argv)
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        return subprocess.run(words, stdin=subprocess.DEVNULL, timeout=timeout, check=True, **out).stdout
    except (OSError, subprocess.SubprocessError) as exc:
        pbs.logmsg(pbs.LOG_WARNING, "belljar: %s: %s: %s" % (argv[0], exc, (getattr(exc, "output", b"") or b"")[-300:]))
        return b""


def main():
    event = pbs.event()
    acts = {
        "EXECJOB_BEGIN": begin, "EXECJOB_LAUNCH": launch, "EXECJOB_EPILOGUE": epilogue, "EXECJOB_END": end,
        "EXECHOST_STARTUP": tidy, "EXECHOST_PERIODIC": tidy,
    }  # fmt: skip
    for name, act in acts.items():
        if event.type == getattr(pbs, name, None):
            config = settings()
            try:
                act(event, config)
            except Exception as exc:  # SystemExit, by which accept and reject leave, is none
                failed(event, config, name, exc)
    event.accept()


def failed(event, config, name, exc):
    """Our own mistake hurts no job without a machine. One with a machine must not run outside of it."""
    pbs.logmsg(pbs.LOG_ERROR, "belljar: %s: %s: %s" % (name, type(exc).__name__, exc))
    if name == "EXECJOB_LAUNCH" and image_of(event.job, config):
        event.job.Hold_Types = pbs.hold_types("u")
        event.job.rerun()
        event.reject("belljar: %s: %s" % (type(exc).__name__, exc))


main()
