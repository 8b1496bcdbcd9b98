"""The hook files of OpenPBS, run as they are with a stand-in for PBS's module."""

from __future__ import annotations

import ast
import json
import os
import pwd
import stat
from pathlib import Path
from typing import Any

import pytest
from tests.batch.lab import pbs_module
from tests.batch.lab.mom import Asked
from tests.batch.lab.pbs_module import Refused, Resources

from belljar.batch import Settings
from belljar.batch.job.policy import site_of
from belljar.batch.pbs.openpbs.site import HOOKS, text_of

USER = pwd.getpwuid(os.geteuid()).pw_name
NODE, SUBMIT = "belljar_node", "belljar_submit"


class Hooks:
    """One node and its server."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, []  # type: ignore[var-annotated]
        self.calls = folder / "calls"
        (folder / "mom_priv/jobs").mkdir(parents=True)
        for name in ("nosuch", "belljar"):
            (folder / name).write_text(f'#!/bin/sh\necho "$@" >>{self.calls}\n')
            (folder / name).chmod(0o755)
        self.settings: dict[str, Any] = {
            "wrapper": "/opt/belljar/libexec/wrap-openpbs", "belljar": str(folder / "belljar"), "retries": 3,
            "notes": str(folder / "notes"), "store": str(folder / "store"), **site_of(Settings()),
        }  # fmt: skip

    def run(self, event: Any, hook: str = NODE, server: Any = None) -> Any:
        config = self.folder / "config.json"
        config.write_text(json.dumps(self.settings))
        file = self.folder / f"{hook}.py"
        file.write_bytes(text_of(hook))  # one file of three, as it is installed
        conf = {"PBS_HOME": str(self.folder), "PBS_EXEC": str(self.folder / "exec")}
        pbs_module.run(file, config, event, conf, self.log, server)
        return event

    def job(self, asked: Asked, **facts: Any) -> Any:
        job = pbs_module.job_of("7.srv", USER, asked, "n1", 10)
        job.__dict__.update(facts)
        return job

    def launch(self, asked: Asked, argv: list[str | bytes] | None = None, **env: str) -> Any:
        program = os.fsdecode(asked.argv[0]) if asked.argv else "/bin/bash"
        seen = pbs_module.as_hook_argv(argv if argv is not None else asked.argv) if asked.argv else []
        env = {"PBS_TASKNUM": "1", "PBS_NODENUM": "0", **env}
        self.job_now = job = self.job(asked)
        return self.run(pbs_module.event_of("EXECJOB_LAUNCH", job, env=env, progname=program, argv=seen))

    def epilogue(self, note: object, runs: int = 1) -> Any:
        folder = self.folder / "notes/7.srv"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "note").write_bytes(note if isinstance(note, bytes) else json.dumps(note).encode())
        return self.run(pbs_module.event_of("EXECJOB_EPILOGUE", self.job(Asked(runs=runs))))


@pytest.fixture
def hooks(tmp_path: Path) -> Hooks:
    return Hooks(tmp_path)


VM = {"ncpus": "2", "mem": "1gb", "vm_image": "debian12", "walltime": "00:10:00"}


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_a_hook_can_be_read_by_an_old_python(name: str) -> None:
    ast.parse(text_of(name), feature_version=(3, 5))


# -- launch ------------------------------------------------------------------------------------------------------------


def facts_of(event: Any) -> dict[str, Any]:
    assert event.argv[1].startswith("--facts=") and event.argv[2] == "--" and " " not in event.argv[1]
    return json.loads(event.argv[1].removeprefix("--facts="))


def test_a_job_without_an_image_is_left_as_it_is(hooks: Hooks) -> None:
    event = hooks.launch(Asked(argv=("/bin/echo", "a b", "c")))
    assert (event.progname, event.argv) == ("/bin/echo", ["/bin/echo", "a b", "c"])
    event = hooks.launch(Asked(script="x"))
    assert (event.progname, event.argv) == ("/bin/bash", [])


def test_a_script_with_an_image_is_started_through_the_wrapper(hooks: Hooks) -> None:
    event = hooks.launch(Asked(script="x", resources={**VM, "vm_disk": "5gb"}, runs=2))
    assert event.progname == "/opt/belljar/libexec/wrap-openpbs"
    assert event.argv[3:] == ["/bin/bash", "-bash"]
    assert facts_of(event) == {
        "image": "debian12", "queue": "workq", "cpus": 2, "memory": 1 << 30, "disk": 5 << 30, "wall": 600, "runs": 2,
        "grace": 10, "note": str(hooks.folder / "notes/7.srv/note"), "script": True,
    }  # fmt: skip


def test_the_queue_and_the_site_give_an_image_too(hooks: Hooks) -> None:
    hooks.settings["queue_images"] = {"workq": "el9"}
    assert facts_of(hooks.launch(Asked(script="x")))["image"] == "el9"
    hooks.settings.update(queue_images={}, default_image="debian12")
    assert facts_of(hooks.launch(Asked(script="x")))["image"] == "debian12"
    assert facts_of(hooks.launch(Asked(script="x", resources={"vm_image": "own"})))["image"] == "own"


def test_a_task_of_the_task_manager_is_left_alone(hooks: Hooks) -> None:
    for env in ({"PBS_TASKNUM": "2"}, {"PBS_NODENUM": "1"}):
        event = hooks.launch(Asked(script="x", resources=VM), **env)
        assert event.progname == "/bin/bash"


@pytest.mark.parametrize(
    "word", ["$(id)", "it's", 'x"y', "a\\b", "ü", "z,w", "-x", "--", "--facts={}", "&amp;", "</x>", "a=b"]
)
def test_arguments_are_left_as_they_are(hooks: Hooks, word: str) -> None:
    event = hooks.launch(Asked(argv=("/bin/echo", word)))
    assert (event.progname, event.argv) == ("/bin/echo", ["/bin/echo", word])
    assert hooks.launch(Asked(argv=("/bin/echo", word), resources=VM)).argv[3:] == ["/bin/echo", "/bin/echo", word]


def test_our_own_mistake_holds_a_job_with_an_image_and_no_other(hooks: Hooks) -> None:
    del hooks.settings["wrapper"]
    assert hooks.launch(Asked(script="x")).progname == "/bin/bash"
    with pytest.raises(Refused, match="belljar: KeyError"):
        hooks.launch(Asked(script="x", resources=VM))


def server_says(hooks: Hooks, text: str | None) -> None:
    """What `qstat -f` prints; None: it fails."""
    tool = hooks.folder / "exec/bin/qstat"
    tool.parent.mkdir(parents=True, exist_ok=True)
    (hooks.folder / "says").write_text(text or "")
    tool.write_text(
        f'#!/bin/sh\necho "$@" >>{hooks.calls}\ncat {hooks.folder}/says\nexit {0 if text is not None else 1}\n'
    )
    tool.chmod(0o755)


AGAIN = Path("tests/recordings/openpbs/qstat_again.txt").read_text()


def test_a_server_that_means_to_queue_a_job_for_ever_is_made_to_forget_it(hooks: Hooks) -> None:
    """OpenPBS 22.05 and 23.06: seen to start a job 17 times that ended well each time."""
    server_says(hooks, AGAIN)
    with pytest.raises(Refused, match="not started"):
        hooks.launch(Asked(script="x", resources=VM, runs=2))
    assert hooks.job_now.changes == {"run_count": 1, "rerun": True}
    assert hooks.launch(Asked(script="x", runs=2)).progname == "/bin/bash", "not ours"
    assert hooks.launch(Asked(script="x", resources=VM)).progname.endswith("wrap-openpbs"), "its first start"
    assert hooks.calls.read_text() == "-f -w 7.srv\n", "asked only where it matters"


@pytest.mark.parametrize("says", [AGAIN.replace("= -18", "= -16"), AGAIN.replace("Exit_status = -18", ""), "", None])
def test_any_other_job_that_starts_again_is_started(hooks: Hooks, says: str | None) -> None:
    server_says(hooks, says)
    event = hooks.launch(Asked(script="x", resources=VM, runs=2))
    assert facts_of(event)["runs"] == 2 and hooks.job_now.changes == {}


def test_a_line_break_in_a_users_variable_begins_no_line_of_the_servers(hooks: Hooks) -> None:
    """Else its job would be given back at each start, for ever: as src/cmds/qstat.c prints it with and without -w."""
    server_says(hooks, "")
    raw, wide = (
        AGAIN.replace("Exit_status = -18", f"Variable_List = A=x{one}    Exit_status = -18") for one in ("\n", "\\n")
    )
    (hooks.folder / "raw").write_text(raw)
    (hooks.folder / "wide").write_text(wide)
    tool = hooks.folder / "exec/bin/qstat"
    tool.write_text(f'#!/bin/sh\ncase " $* " in *" -w "*) cat {hooks.folder}/wide;; *) cat {hooks.folder}/raw;; esac\n')
    hooks.launch(Asked(script="x", resources=VM, runs=2))
    assert hooks.job_now.changes == {}


def test_only_chunks_of_this_node_count(hooks: Hooks) -> None:
    job = hooks.job(
        Asked(script="x", resources=VM), exec_host2="n1:1/0*2+n1:1/1+n2:1/0",
        exec_vnode="(n1:ncpus=2:mem=1048576kb)+(n1[0]:ncpus=1:mem=1024kb+n1[1]:mem=1024kb)+(n2:ncpus=8:mem=9gb)",
    )  # fmt: skip
    env = {"PBS_TASKNUM": "1", "PBS_NODENUM": "0"}
    facts = facts_of(hooks.run(pbs_module.event_of("EXECJOB_LAUNCH", job, env=env, progname="/bin/bash", argv=[])))
    assert (facts["cpus"], facts["memory"]) == (3, (1 << 30) + (2 << 20))


# -- begin and end -----------------------------------------------------------------------------------------------------


def test_begin_makes_a_folder_for_notes_and_end_removes_it(hooks: Hooks) -> None:
    asked = Asked(script="x", resources=VM)
    hooks.run(pbs_module.event_of("EXECJOB_BEGIN", hooks.job(asked)))
    folder = hooks.folder / "notes/7.srv"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE(folder.parent.stat().st_mode) == 0o755
    assert hooks.calls.read_text() == f"internal prolog openpbs 7.srv {USER}\n"
    hooks.run(pbs_module.event_of("EXECJOB_END", hooks.job(asked)))
    assert not folder.exists() and hooks.calls.read_text().endswith(f"internal epilog openpbs 7.srv {USER}\n")


@pytest.mark.parametrize(("status", "is_told"), [(265, True), (271, False), (0, False), (None, False)])
def test_the_epilog_is_told_that_the_job_was_killed(hooks: Hooks, status: int | None, is_told: bool) -> None:
    """A machine that heard TERM knows by itself."""
    asked = Asked(script="x", resources=VM)
    hooks.run(pbs_module.event_of("EXECJOB_BEGIN", hooks.job(asked)))
    hooks.run(pbs_module.event_of("EXECJOB_END", hooks.job(asked, Exit_status=status)))
    last = hooks.calls.read_text().splitlines()[-1]
    assert last == f"internal epilog openpbs 7.srv {USER}" + (" --killed" if is_told else "")


def test_a_job_without_an_image_leaves_no_trace(hooks: Hooks) -> None:
    for event in ("EXECJOB_BEGIN", "EXECJOB_EPILOGUE", "EXECJOB_END"):
        assert hooks.run(pbs_module.event_of(event, hooks.job(Asked(script="x")))).job.changes == {}
    assert not hooks.calls.exists() and not (hooks.folder / "notes").exists()


def test_a_job_whose_variables_pbs_cannot_read_gets_no_machine_and_does_not_run_outside(hooks: Hooks) -> None:
    job = hooks.job(Asked(script="x", resources=VM, env={"A": b"\xff"}))
    with pytest.raises(Refused, match="not UTF-8"):
        hooks.run(pbs_module.event_of("EXECJOB_BEGIN", job))
    assert job.changes == {"delete": True}
    hooks.run(pbs_module.event_of("EXECJOB_BEGIN", hooks.job(Asked(script="x", env={"A": b"\xff"}))))


@pytest.mark.parametrize("lost", ["Variable_List", "argument_list"])
def test_a_job_that_pbs_can_read_in_part_only_does_not_run_outside(hooks: Hooks, lost: str) -> None:
    """As on a server without any queuejob hook: what is not UTF-8 is None, what PBS adds after it is not there."""
    for resources, changes in ((VM, {"delete": True}), ({}, {})):
        job = hooks.job(Asked(argv=("/bin/echo", "x"), resources=resources), **{lost: None})
        event = pbs_module.event_of("EXECJOB_BEGIN", job)
        del event.vnode_list
        if resources:
            with pytest.raises(Refused, match="not UTF-8"):
                hooks.run(event)
        else:
            hooks.run(event)
        assert job.changes == changes and not (hooks.folder / "notes").exists()


@pytest.mark.parametrize("event", ["EXECHOST_STARTUP", "EXECHOST_PERIODIC"])
def test_machines_without_a_job_are_looked_for(hooks: Hooks, event: str) -> None:
    hooks.run(pbs_module.event_of(event, None))
    assert hooks.calls.read_text() == "reap --batch openpbs\n"


# -- epilogue ----------------------------------------------------------------------------------------------------------


def test_a_note_has_the_job_run_again_later(hooks: Hooks) -> None:
    import time

    changes = hooks.epilogue({"verdict": "requeue", "delay": 60, "why": "belljar: try 1 of 3: x"}).job.changes
    assert changes["rerun"] and "Hold_Types" not in changes
    assert 55 < changes["Execution_Time"] - time.time() < 65
    assert "7.srv: belljar: try 1 of 3: x" in hooks.log


@pytest.mark.parametrize(
    ("answer", "again"), [("Rerunable = True", True), ("Rerunable = False", False), ("", False), (None, False)]
)
def test_a_job_that_had_begun_is_given_back_if_the_server_says_it_may(
    hooks: Hooks, answer: str | None, again: bool
) -> None:
    server_says(hooks, None if answer is None else f"    {answer}\n")
    for verdict in ("requeue", "hold"):
        changes = hooks.epilogue({"verdict": verdict, "begun": True}).job.changes
        assert ("rerun" in changes) is again and (again or changes == {})
        assert "rerun" in hooks.epilogue({"verdict": verdict, "begun": False}).job.changes
    assert hooks.calls.read_text() == "-f -w 7.srv\n" * 2, "asked only where it matters"


def test_a_subjob_gets_no_time_to_wait_for(hooks: Hooks) -> None:
    job = hooks.job(Asked(), id="7[3].srv")
    folder = hooks.folder / "notes/7[3].srv"
    folder.mkdir(parents=True)
    (folder / "note").write_text('{"verdict":"requeue","delay":60}')
    assert hooks.run(pbs_module.event_of("EXECJOB_EPILOGUE", job)).job.changes == {"rerun": True}


def test_a_note_has_the_job_held(hooks: Hooks) -> None:
    assert hooks.epilogue({"verdict": "hold", "why": "x"}).job.changes == {"Hold_Types": "u", "rerun": True}


def test_the_number_of_starts_is_bounded_whatever_the_note_says(hooks: Hooks) -> None:
    assert hooks.epilogue({"verdict": "requeue"}, runs=3).job.changes["Hold_Types"] == "u"
    hooks.settings["retries"] = 1000
    assert hooks.epilogue({"verdict": "requeue"}, runs=20).job.changes["Hold_Types"] == "u"


@pytest.mark.parametrize("delay", [-5, 10**12, "x", None, [1], 1e300])
def test_a_delay_is_bounded(hooks: Hooks, delay: object) -> None:
    import time

    changes = hooks.epilogue({"verdict": "requeue", "delay": delay}).job.changes
    assert 0 <= changes["Execution_Time"] - time.time() <= 86401


@pytest.mark.parametrize(
    "note", [b"", b"{", b"[]", b'{"verdict":"delete"}', b"\xff", b'{"verdict":"requeue"' + b" " * 5000 + b"}"]
)
def test_what_is_no_note_changes_nothing(hooks: Hooks, note: bytes) -> None:
    assert hooks.epilogue(note).job.changes == {}


def test_a_link_or_a_pipe_is_no_note(hooks: Hooks) -> None:
    folder = hooks.folder / "notes/7.srv"
    folder.mkdir(parents=True)
    (hooks.folder / "other").write_text('{"verdict":"hold"}')
    event = pbs_module.event_of("EXECJOB_EPILOGUE", hooks.job(Asked()))
    (folder / "note").symlink_to(hooks.folder / "other")
    assert hooks.run(event).job.changes == {}
    (folder / "note").unlink()
    os.mkfifo(folder / "note")
    assert hooks.run(event).job.changes == {}


def test_a_reason_from_a_user_is_one_plain_line(hooks: Hooks) -> None:
    hooks.epilogue({"verdict": "hold", "why": "a\nb\"'\\" + "x" * 400})
    line = hooks.log[0]
    assert "\n" not in line and '"' not in line and len(line) < 230


# -- submit ------------------------------------------------------------------------------------------------------------


def submit(hooks: Hooks, kind: str = "QUEUEJOB", queue: str = "", user: str = USER, **facts: Any) -> None:
    resources = Resources(
        {name: facts.pop(name) for name in ("select", "ncpus", "mem", "ngpus", "vm_image", "vm_disk") if name in facts}
    )
    job = pbs_module.Job(**{
        "Resource_List": resources, "queue": queue, "Variable_List": {"PBS_O_PATH": "/bin"}, "executable": None,
        "argument_list": None, "Submit_arguments": "a.sh", **facts,
    })  # fmt: skip
    hooks.run(
        pbs_module.event_of(
            kind, job, requestor=user, job_o=pbs_module.Job(queue="night" if kind == "MODIFYJOB" else "")
        ),
        SUBMIT,
    )


@pytest.fixture
def store(hooks: Hooks) -> Path:
    names = hooks.folder / "store/images/names"
    names.mkdir(parents=True)
    for name in ("debian12", "el9"):
        (names / name).touch()
    return names


def test_a_known_image_is_let_in(hooks: Hooks, store: Path) -> None:
    submit(hooks, vm_image="debian12")
    submit(hooks, select="2:ncpus=1:mem=1gb:vm_image=el9+1:ncpus=2")
    submit(hooks)


@pytest.mark.parametrize("image", ["nosuch", "../x", "$(id)", "a b", "x" * 200, "ü", "-x", "debian12\n"])
def test_another_one_is_refused_with_a_sentence(hooks: Hooks, store: Path, image: str) -> None:
    with pytest.raises(
        Refused,
        match=r"(?s)belljar: image .*: (not a name of an image|there is none of this name; there are: debian12, el9)",
    ):
        submit(hooks, vm_image=image)


def test_without_the_store_in_sight_the_node_decides(hooks: Hooks) -> None:
    submit(hooks, vm_image="nosuch")


def test_the_site_says_who_may_have_what(hooks: Hooks, store: Path) -> None:
    hooks.settings["allow"] = [["queue", "night", "el*"], ["user", "nobody", "*"]]
    submit(hooks, vm_image="el9", queue="night")
    with pytest.raises(Refused, match=r"image debian12: not allowed for .* in queue night[.] Allowed are: el[*]"):
        submit(hooks, vm_image="debian12", queue="night")
    with pytest.raises(Refused, match=r"in queue workq\. No image is allowed there"):
        submit(hooks, vm_image="el9")


def test_a_queue_with_an_image_of_its_own_is_looked_at_too(hooks: Hooks, store: Path) -> None:
    hooks.settings["queue_images"] = {"workq": "gone"}
    with pytest.raises(Refused, match="image gone: there is none"):
        submit(hooks)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"select": "1:ncpus=8:mem=1gb"}, "8 cpus: a job in a machine may have at most 4 here"),
        ({"select": "1:ncpus=1:mem=64gb"}, "65536 MiB of memory: a job in a machine may have at most 8192 here"),
        ({"ncpus": 8}, "8 cpus"),
        ({"mem": "100mb"}, "100 MiB of memory: a job in a machine needs at least 480"),
        ({"mem": "1gb", "vm_disk": "1tb"}, "1048576 MiB of disk: a job in a machine may have at most 102400 here"),
        ({"select": "1:ncpus=1:mem=1gb:ngpus=1"}, "a machine has no GPU"),
        ({"ngpus": 1}, "a machine has no GPU"),
    ],
)
def test_sizes_that_no_node_gives_are_refused(hooks: Hooks, store: Path, asked: dict[str, Any], sentence: str) -> None:
    hooks.settings.update(max_cpus=4, max_memory=8 << 30, max_disk=100 << 30, least_memory=480 << 20)
    asked = {"select": asked["select"] + ":vm_image=el9"} if "select" in asked else {**asked, "vm_image": "el9"}
    with pytest.raises(Refused, match=sentence):
        submit(hooks, **asked)
    # No image: no limit.
    submit(hooks, **{name: value for name, value in asked.items() if name in ("ncpus", "ngpus", "vm_disk")})


def test_a_disk_that_the_image_does_not_fit_on_is_refused(hooks: Hooks, store: Path) -> None:
    hooks.settings["scratch"] = 0
    (store / "el8").mkdir()
    (store / "el8/manifest.json").write_text(json.dumps({"virtual_size": 3 << 30}))
    submit(hooks, vm_image="el8", vm_disk="3gb")
    submit(hooks, vm_image="el9", vm_disk="1mb")  # its size cannot be seen from here
    for asked in ({"vm_image": "el8", "vm_disk": "1gb"}, {"select": "1:vm_image=el8:mem=1gb", "vm_disk": "1gb"}):
        with pytest.raises(Refused, match="belljar: 1024 MiB of disk: the image el8 needs at least 3072"):
            submit(hooks, **asked)
    hooks.settings["scratch"] = 1 << 30  # then it is the size of another disk
    submit(hooks, vm_image="el8", vm_disk="1gb")


def test_qalter_is_looked_at_where_it_asks_for_an_image(hooks: Hooks, store: Path) -> None:
    submit(hooks, "MODIFYJOB", Variable_List=None)
    with pytest.raises(Refused, match="there is none of this name"):
        submit(hooks, "MODIFYJOB", select="1:vm_image=nosuch", Variable_List=None)


def test_what_pbs_would_lose_is_refused_for_every_job(hooks: Hooks) -> None:
    for facts in ({"Variable_List": None}, {"executable": "/bin/echo", "Submit_arguments": None}):
        with pytest.raises(Refused, match="not UTF-8"):
            submit(hooks, **facts)


@pytest.mark.parametrize("word", ["n\nl", "\ttab", " lead", "trail ", "", "\x01"])
def test_an_argument_that_hooks_of_pbs_would_harm_is_refused(hooks: Hooks, word: str) -> None:
    tag = "<jsdl-hpcpa:Argument>{}</jsdl-hpcpa:Argument>"
    submit(hooks, executable="/bin/echo", argument_list=tag.format("a b") + tag.format("&lt;"))
    with pytest.raises(Refused, match="PBS would lose it; use a script"):
        submit(hooks, executable="/bin/echo", argument_list=tag.format("a") + tag.format(word))


def test_our_own_mistake_refuses_nobody(hooks: Hooks) -> None:
    hooks.settings = {}
    submit(hooks, vm_image="debian12")
    assert "belljar: KeyError" in hooks.log[0]
