"""The plugin of slurmctld, run by the very library slurmctld runs it with."""

from __future__ import annotations

import ctypes
import ctypes.util
import json
from pathlib import Path

import pytest

from belljar.batch import Settings
from belljar.batch.install.pieces import Place
from belljar.batch.slurm.site import in_lua, plugin_text
from belljar.errors import BadOption, BadSetting
from belljar.model import GIB, MIB

LIBRARY = ctypes.util.find_library("lua5.1")
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="no liblua5.1 on this host")
SCRIPT = "#!/bin/sh\necho hi\n"
NO_VAL = 4294967294

STUB = """
local said = {}
slurm = { SUCCESS = 0, ERROR = -1, log_user = function(...) said[#said + 1] = string.format(...) end }
local plugin = assert(loadstring(PLUGIN))()
local result = plugin[VERB](unpack(ARGS, 1, 4))
return table.concat({ tostring(result), ARGS[1].script or "", table.concat(said, "; ") }, "\\0")
"""


def run_lua(code: str) -> bytes:
    """The string a chunk returns. Raises AssertionError with Lua's own message."""
    lua = ctypes.CDLL(LIBRARY)
    for name, kind in (("luaL_newstate", ctypes.c_void_p), ("lua_tolstring", ctypes.c_void_p)):
        getattr(lua, name).restype = kind
    state = ctypes.c_void_p(lua.luaL_newstate())
    try:
        lua.luaL_openlibs(state)
        text = code.encode("utf-8", "surrogateescape")
        failed = lua.luaL_loadbuffer(state, text, ctypes.c_size_t(len(text)), b"test") or lua.lua_pcall(state, 0, 1, 0)
        size = ctypes.c_size_t()
        pointer = lua.lua_tolstring(state, -1, ctypes.byref(size))
        answer = ctypes.string_at(pointer, size.value) if pointer else b""
        assert not failed, answer.decode(errors="replace")
        return answer
    finally:
        lua.lua_close(state)


def written(value: object) -> str:
    """A value as Lua writes it. Not the product's own quoting, which is under test."""
    if isinstance(value, dict):
        return "{" + ",".join(f"[{written(key)}]={written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, str):
        return '"' + "".join(f"\\{byte:03d}" for byte in value.encode("utf-8", "surrogateescape")) + '"'
    return str(value)


class Submission:
    def __init__(self, tmp_path: Path, settings: Settings | None = None, **options: str) -> None:
        self.names = tmp_path / "images/names"
        self.names.mkdir(parents=True)
        for image in ("debian12", "alma9", "secret"):
            (self.names / image).write_text("")
        place = Place(
            settings or Settings(), Path("/opt/belljar/libexec/wrap-slurm"), Path("/opt/belljar/libexec/belljar"),
            tmp_path, Path("/etc/slurm"), options,
        )  # fmt: skip
        self.plugin = plugin_text(place).decode()

    def _call(self, verb: str, *args: object) -> tuple[int, str, str]:
        arguments = ",".join(written(arg) for arg in args)
        code = f"local PLUGIN, VERB, ARGS = {written(self.plugin)}, {written(verb)}, {{{arguments}}}\n{STUB}"
        result, script, said = run_lua(code).decode("utf-8", "replace").split("\0")
        return int(result), script, said

    def submit(self, comment: str = "", parts: dict[str, object] | None = None, **job: object) -> tuple[int, str, str]:
        parts = parts or {"batch": {"flag_default": 1, "max_time": NO_VAL + 1, "default_time": NO_VAL}}
        whole = {"script": SCRIPT, "user_name": "alice", "user_id": 0, "time_limit": NO_VAL, "min_nodes": NO_VAL, **job}
        if comment:
            whole["comment"] = comment
        return self._call(
            "submit", {name: one for name, one in whole.items() if one is not None}, parts, whole["user_id"]
        )

    def modify(self, changes: dict[str, object], record: dict[str, object], uid: int = 1001) -> tuple[int, str, str]:
        return self._call("modify", changes, record, {}, uid)


def line(script: str) -> str:
    return script.removesuffix(SCRIPT)


def test_a_job_that_asks_for_nothing_is_untouched(tmp_path: Path) -> None:
    assert Submission(tmp_path).submit("project=5, about vmware=yes xvm=1") == (0, SCRIPT, "")


def test_what_has_no_script_and_gets_no_image_is_untouched(tmp_path: Path) -> None:
    assert Submission(tmp_path, Settings(queue_images=("night=debian12",))).submit("about", script=None) == (0, "", "")


@pytest.mark.parametrize(
    "asked",
    [{"comment": "vm=debian12"}, {"features": "vm_debian12"}, {"partition": "night"}, {"partition": "batch,night"}],
)
def test_what_has_no_script_never_runs_outside_without_a_word(tmp_path: Path, asked: dict[str, str]) -> None:
    """srun and salloc."""
    settings = Settings(queue_images=("night=debian12",))
    result, _, said = Submission(tmp_path, settings).submit(script=None, **asked)
    what = f"partition {asked['partition']}" if "partition" in asked else "image debian12"
    assert result == -1 and said.startswith(
        f"belljar: {what}: only a script of sbatch runs in a machine; once it runs, `srun"
    )
    with_bait = Submission(tmp_path / "bait", settings, bait="vm")
    assert (
        "in partition vm a script has a node of its own, where srun works" in with_bait.submit(script=None, **asked)[2]
    )
    assert with_bait.submit(script=None, partition="vm")[0] == 0


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ({"het_job_offset": 0}, "one part, this one is heterogeneous"),
        ({"het_job_offset": 1, "script": None}, "one part, this one is heterogeneous"),
        ({"tres_per_node": "gres:gpu:1"}, "a machine has no GPU"),
        ({"tres_per_job": "gres/gpu:tesla:2"}, "a machine has no GPU"),
    ],
)
def test_what_a_machine_cannot_give_is_refused_where_the_job_gets_one(
    tmp_path: Path, job: dict[str, object], why: str
) -> None:
    submission = Submission(tmp_path, Settings(queue_images=("night=debian12",)))
    for asked, what in (({"comment": "vm=debian12"}, "image debian12"), ({"partition": "night"}, "partition night")):
        result, _, said = submission.submit(**asked, **job)  # type: ignore[arg-type]
        assert result == -1 and said.startswith(f"belljar: {what}: ") and why in said
    assert submission.submit(**job)[0] == 0  # type: ignore[arg-type]
    assert submission.submit("vm=debian12", het_job_offset=NO_VAL, tres_per_node="gres:nvme")[0] == 0


@pytest.mark.parametrize("comment", ["vm=debian12", "x vm=debian12 y", "a=b,vm=debian12;c", "\tvm=debian12\nfoo"])
def test_the_image_in_the_comment(tmp_path: Path, comment: str) -> None:
    result, script, _ = Submission(tmp_path).submit(comment)
    assert (result, line(script)) == (0, "#!/opt/belljar/libexec/wrap-slurm --array=no --image=debian12\n")


def test_time_disk_and_array(tmp_path: Path) -> None:
    _, script, _ = Submission(tmp_path).submit("vm=debian12", time_limit=90, pn_min_tmp_disk=5120, array_inx="1-3")
    assert line(script).split()[1:] == ["--array=yes", "--time=90", "--disk=5120", "--image=debian12"]


@pytest.mark.parametrize(("tmp", "scratch", "is_good"), [(6000, 0, False), (8192, 0, True), (6000, 1, True)])
def test_a_disk_smaller_than_the_images_is_refused_at_submission(
    tmp_path: Path, tmp: int, scratch: int, is_good: bool
) -> None:
    site = Submission(tmp_path, Settings(scratch=scratch))
    (site.names / "debian12").unlink()
    (site.names / "debian12").mkdir()
    (site.names / "debian12/manifest.json").write_text(json.dumps({"virtual_size": 8 << 30}, indent=1))
    result, _, said = site.submit("vm=debian12", pn_min_tmp_disk=tmp)
    assert result == (0 if is_good else -1)
    assert is_good or "--tmp=6000 (MiB): the disk of image debian12 has 8192 MiB already" in said


@pytest.mark.parametrize(
    ("asked", "part", "minutes"),
    [(NO_VAL, (30, 60), 30), (NO_VAL, (NO_VAL, 60), 60), (NO_VAL, (NO_VAL, NO_VAL + 1), None), (7, (30, 60), 7)],
)
def test_the_partitions_limit_of_time(tmp_path: Path, asked: int, part: tuple[int, int], minutes: int | None) -> None:
    parts = {"batch": {"flag_default": 1, "default_time": part[0], "max_time": part[1]}}
    _, script, _ = Submission(tmp_path).submit("vm=debian12", parts, time_limit=asked)
    assert (f"--time={minutes}" in script) if minutes else "--time" not in script


@pytest.mark.parametrize(
    "name",
    [
        "../../x",
        "$(id)",
        "`id`",
        "a'b",
        'a"b',
        "é",
        "a%s%n",
        "-x",
        ".hidden",
        "x" * 101,
        "a|b",
        "[[x]]",
        "\x1b[1m",
        "\udcff",
        "",
    ],
)
def test_what_can_be_no_name_is_refused_in_words_of_its_own(tmp_path: Path, name: str) -> None:
    result, script, said = Submission(tmp_path).submit(f"vm={name}")
    assert (result, script) == (-1, SCRIPT)
    assert said.startswith("belljar: '") and "is no name of an image" in said
    assert said.isprintable() and len(said) < 250


def test_the_longest_name(tmp_path: Path) -> None:
    """Older kernels read 127 bytes of our line: better refused than cut."""
    submission, most = Submission(tmp_path), 60
    for size in (most, most + 1):
        (submission.names / ("x" * size)).write_text("")
    result, script, _ = submission.submit("vm=" + "x" * most, time_limit=99999)
    assert result == 0 and len(line(script)) <= 127
    assert submission.submit("vm=" + "x" * (most + 1), time_limit=99999)[0] == -1


def test_an_unknown_image(tmp_path: Path) -> None:
    assert Submission(tmp_path).submit("vm=debian99") == (-1, SCRIPT, "belljar: no image is called debian99 here")


def test_a_store_slurmctld_cannot_see_refuses_nothing(tmp_path: Path) -> None:
    submission = Submission(tmp_path)
    for name in submission.names.iterdir():
        name.unlink()
    submission.names.rmdir()
    assert submission.submit("vm=debian99")[0] == 0


def test_two_images_are_none(tmp_path: Path) -> None:
    assert "more than one image" in Submission(tmp_path).submit("vm=debian12 vm=alma9")[2]
    assert "same image" in Submission(tmp_path / "b").submit("vm=debian12", features="vm_alma9")[2]
    said = Submission(tmp_path / "c").submit(features="vm_debian12|vm_alma9")[2]
    assert (
        said
        == "belljar: the constraint 'vm_alma9' does not name the same image as the other constraints or the comment"
    )


def test_the_image_as_a_constraint(tmp_path: Path) -> None:
    submission = Submission(tmp_path, feature="el9=alma9")
    assert "--image=debian12" in submission.submit(features="intel&vm_debian12")[1]
    assert "--image=alma9" in submission.submit(features="[el9*2]")[1]
    assert submission.submit(features="intel|ssd") == (0, SCRIPT, "")


def test_the_partition_is_the_environment(tmp_path: Path) -> None:
    submission = Submission(tmp_path, Settings(queue_images=("night=debian12", "dusk=debian12", "dawn=alma9")))
    # No image in the line: where the job then runs decides.
    assert line(submission.submit(partition="night")[1]) == "#!/opt/belljar/libexec/wrap-slurm --array=no\n"
    assert submission.submit(partition="batch") == (0, SCRIPT, "")
    for several in ("night,dusk", "night,dawn", "batch,night"):
        assert line(submission.submit(partition=several)[1]) == "#!/opt/belljar/libexec/wrap-slurm --array=no\n"
    assert "--image=alma9" in submission.submit("vm=alma9", partition="night")[1]


def test_the_default_image_and_the_default_partition(tmp_path: Path) -> None:
    assert line(Submission(tmp_path, Settings(default_image="debian12")).submit()[1]) != ""
    submission = Submission(tmp_path / "b", Settings(queue_images=("batch=debian12",)))
    assert line(submission.submit()[1]) != ""


def test_who_may_use_what(tmp_path: Path) -> None:
    allow = ("* debian*", "user:alice alma9", "group:root secret", "queue:night secret")
    submission = Submission(tmp_path, Settings(allow=allow))
    assert submission.submit("vm=debian12", user_name="bob")[0] == 0
    assert submission.submit("vm=alma9")[0] == 0
    refused = submission.submit("vm=alma9", user_name="bob", user_id=65534)
    assert refused[2] == "belljar: image alma9: not allowed for bob in partition batch. Allowed are: debian*."
    assert submission.submit("vm=secret", user_id=0)[0] == 0  # root is in the group root
    assert submission.submit("vm=secret", user_id=65534)[0] == -1
    assert submission.submit("vm=secret", user_id=65534, partition="night")[0] == 0


def test_nobody_may_use_any(tmp_path: Path) -> None:
    assert "No image is allowed there." in Submission(tmp_path, Settings(allow=())).submit("vm=debian12")[2]


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"min_cpus": 5}, "belljar: 5 cpus: a job in a machine may have at most 4 here"),
        ({"cpus_per_task": 3, "num_tasks": 2}, "belljar: 6 cpus: a job in a machine may have at most 4 here"),
        ({"min_mem_per_node": 3000}, "belljar: 3000 MiB of memory: a job in a machine may have at most 2048 here"),
        (
            {"min_mem_per_cpu": 1100, "min_cpus": 2},
            "belljar: 2200 MiB of memory: a job in a machine may have at most 2048 here",
        ),
        ({"pn_min_tmp_disk": 20000}, "belljar: 20000 MiB of disk: a job in a machine may have at most 10240 here"),
        (
            {"min_mem_per_node": 100},
            "belljar: 100 MiB of memory: a job in a machine needs at least 456 MiB, for the guest and for what makes it",
        ),
        ({"min_nodes": 2}, "belljar: 2 nodes: a job in a machine has one"),
        ({"min_cpus": 4, "min_mem_per_node": 2048, "pn_min_tmp_disk": 10240, "min_nodes": 1}, ""),
        ({"min_cpus": NO_VAL, "min_mem_per_node": NO_VAL + 1, "min_mem_per_cpu": NO_VAL}, ""),
    ],
)
def test_sizes(tmp_path: Path, job: dict[str, object], said: str) -> None:
    submission = Submission(tmp_path, Settings(max_cpus=4, max_memory=2 * GIB, max_disk=10 * GIB, overhead=200 * MIB))
    assert submission.submit("vm=debian12", **job)[::2] == (-1 if said else 0, said)


def test_our_own_line_is_never_doubled_and_never_believed(tmp_path: Path) -> None:
    submission = Submission(tmp_path, Settings(allow=("* debian*",)))
    forged = "#!/opt/belljar/libexec/wrap-slurm --image=secret\n" + SCRIPT
    assert submission.submit(script=forged) == (0, SCRIPT, "")
    assert submission.submit("vm=debian12", script=forged)[1].count("wrap-slurm") == 1


def test_what_may_be_changed_after_submission(tmp_path: Path) -> None:
    submission = Submission(tmp_path, Settings(queue_images=("night=debian12", "dusk=alma9")))
    vm: dict[str, object] = {"comment": "vm=debian12", "partition": "batch"}
    bare: dict[str, object] = {"partition": "batch"}
    assert submission.modify({"comment": "vm=debian12 belljar=1 try 1 of 3: x"}, vm)[0] == 0
    assert submission.modify({"comment": "something else"}, vm)[0] == 0
    assert submission.modify({"time_limit": 5}, vm)[0] == 0
    assert submission.modify({"partition": "night"}, vm)[0] == 0
    assert submission.modify({"partition": "dusk"}, {"partition": "night"})[0] == 0
    assert "cannot be changed" in submission.modify({"comment": "vm=alma9"}, vm)[2]
    assert "cannot be changed" in submission.modify({"comment": "vm=debian12"}, bare)[2]
    assert "no name of an image" in submission.modify({"comment": "vm=$(id)"}, vm)[2]
    assert "partition night" in submission.modify({"partition": "night"}, bare)[2]
    assert submission.modify({"partition": "night"}, bare, uid=0)[0] == 0


def test_a_job_for_a_bait_is_left_alone_and_stays_one(tmp_path: Path) -> None:
    submission = Submission(tmp_path, Settings(default_image="debian12"), bait="vm belljar")
    assert submission.submit("vm=worker net=closed", partition="vm", min_nodes=2) == (0, SCRIPT, "")
    assert submission.submit(partition="belljar") == (0, SCRIPT, "")
    assert line(submission.submit(partition="batch")[1]) != ""
    assert submission.submit(partition="batch,vm") == (
        -1, SCRIPT, "belljar: partitions batch,vm: some of them give a job a node of its own, some do not; ask for one kind",
    )  # fmt: skip
    bait: dict[str, object] = {"comment": "vm=worker", "partition": "belljar"}
    assert submission.modify({"comment": "vm=other", "partition": "vm"}, bait)[0] == 0
    assert submission.modify({"partition": "batch"}, bait)[2] == (
        "belljar: partition batch gives jobs another environment: submit the job there"
    )
    assert submission.modify({"partition": "vm"}, {"partition": "batch"})[0] == -1
    assert submission.modify({"partition": "batch"}, bait, uid=0)[0] == 0


@pytest.mark.parametrize("text", ["", 'a"b\\c', "é\n]]", "x" * 300, "--[[", "\0"])
def test_quoting(text: str) -> None:
    assert run_lua(f"return {in_lua(text)}").decode() == text


@pytest.mark.parametrize(
    ("settings", "options", "wrapper"),
    [
        (Settings(allow=("alice debian",)), {}, "/w"),
        (Settings(queue_images=("night",)), {}, "/w"),
        (Settings(queue_images=("night=a b",)), {}, "/w"),
        (Settings(), {"feature": "el9"}, "/w"),
        (Settings(), {"feature": "el9=../x"}, "/w"),
        (Settings(), {}, "/a b/w"),
        (Settings(), {}, "/" + "w" * 120),
    ],
)
def test_settings_that_cannot_be_meant(settings: Settings, options: dict[str, str], wrapper: str) -> None:
    with pytest.raises((BadSetting, BadOption)):
        plugin_text(Place(settings, Path(wrapper), Path("/b"), Path("/s"), Path("/etc/slurm"), options))


# -- containers ----------------------------------------------------------------------------------------------------------


def test_a_container_of_the_sites_own_is_untouched(tmp_path: Path) -> None:
    site = Submission(tmp_path, Settings(default_image="debian12"))
    assert site.submit(container="/images/theirs") == (0, SCRIPT, "")
    result, script, said = site.submit("vm=debian12", container="/images/theirs")
    assert (result, script) == (-1, SCRIPT) and "in a container or in a machine, not in both" in said
