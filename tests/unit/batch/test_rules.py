"""The site's rules, sizes, the environment and the verdict: what every dialect has in common."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.batch import Settings, load, names
from belljar.batch.job.policy import (
    ADDRESS_SPACE,
    DATA_SPACE,
    SMALLEST_GUEST,
    Asker,
    check_allowed,
    check_limits,
    guest_memory,
    image_for,
    may_be_own,
    overhead,
    queue_images,
    registries,
    rounded,
    rules,
)
from belljar.batch.job.request import for_guest
from belljar.batch.job.terms import Job, Verdict
from belljar.batch.job.verdict import delay, judge, why
from belljar.errors import BadSetting, NotPermitted, OverLimit
from belljar.model import GIB, MIB, Cause, Outcome, OutcomeClass

HOSTILE = [
    "$(id)", "`id`", "a b", "a;id", "../../x", "/etc/passwd", "a/b", "", "-x", ".hidden", "a\nb", "'", '"', "\u00e9l9",
    "x" * 101, "a\0b", "$HOME", "%s%n", "*",
]  # fmt: skip


@pytest.mark.parametrize("name", [one for one in HOSTILE if one])
def test_what_is_no_name_of_an_image_is_refused_before_anything_looks_for_it(name: str) -> None:
    with pytest.raises(NotPermitted, match="not a name of an image") as caught:
        image_for(name, "", Settings())
    assert "\n" not in caught.value.message and len(caught.value.message) < 200


@pytest.mark.parametrize("word", ["vms", "=x", "vms=", "vms=../x", "vms=a b"])
def test_a_queue_image_that_is_none_names_the_setting(word: str) -> None:
    with pytest.raises(BadSetting, match=r"batch\.queue_images.*not of the form QUEUE=IMAGE"):
        queue_images(Settings(queue_images=(word,)))


@pytest.mark.parametrize(
    "name", ["", "hub", "https://hub.example.org", "hub.example.org/Team", "-x.y z", "hub:x", "a.b/..//c"]
)
def test_a_registry_that_is_none_names_the_setting(name: str) -> None:
    with pytest.raises(BadSetting, match=r"batch\.registries.*HOST"):
        registries(Settings(registries=(name,)))


@pytest.mark.parametrize("rule", ["", "*", "bob debian12", "group: x", "host:x y", "* a b", "* debian1[12]"])
def test_a_rule_that_is_none_names_the_setting(rule: str) -> None:
    with pytest.raises(BadSetting, match=r"batch\.allow.*WHO PATTERN"):
        rules(Settings(allow=(rule,)))


@pytest.mark.parametrize(
    ("asked", "queue", "image"),
    [("el9", "night", "el9"), ("", "night", "debian11"), ("", "day", "debian12"), ("el9", "", "el9")],
)
def test_the_jobs_own_image_comes_before_the_queues_and_that_before_the_sites(
    asked: str, queue: str, image: str
) -> None:
    assert image_for(asked, queue, Settings(default_image="debian12", queue_images=("night=debian11",))) == image


def test_without_any_of_them_a_job_gets_no_machine() -> None:
    assert image_for("", "night", Settings(queue_images=("day=x",))) == ""


BOB = Asker("bob", {"bob", "physics"}, "night")


@pytest.mark.parametrize(
    ("rule", "is_allowed"),
    [
        ("* *", True), ("* debian*", True), ("* debian11", False), ("user:bob debian12", True), ("user:alice debian12", False),
        ("group:physics debian??", True), ("group:chemistry *", False), ("queue:night debian12", True), ("queue:day *", False),
        ("user:* debian12", False),
    ],
)  # fmt: skip
def test_a_rule_gives_an_image_to_whom_it_names(rule: str, is_allowed: bool) -> None:
    settings = Settings(allow=(rule,))
    if is_allowed:
        check_allowed("debian12", BOB, settings)
    else:
        with pytest.raises(NotPermitted, match="image debian12: not allowed for bob in queue night"):
            check_allowed("debian12", BOB, settings)


@pytest.mark.parametrize(
    ("allow", "may"),
    [
        (("* *",), True), (("* debian*",), False), (("* debian12",), False), (("* **",), False), (("user:alice *", "* debian*"), False),
        (("* debian*", "group:physics *"), True), (("queue:day *",), False), (("queue:night *",), True), ((), False),
    ],
)  # fmt: skip
def test_rules_are_about_the_sites_images_and_only_a_lone_star_means_ones_own(
    allow: tuple[str, ...], may: bool
) -> None:
    assert may_be_own(BOB, Settings(allow=allow)) is may


def test_a_refusal_tells_what_would_be_allowed() -> None:
    with pytest.raises(NotPermitted) as caught:
        check_allowed("el9", BOB, Settings(allow=("group:physics debian*", "user:alice el9")))
    assert caught.value.hint == "Allowed are: debian*."


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((9, None, None), "9 cpus: a job in a machine may have at most 8 here"),
        ((None, 5 * GIB, None), "5120 MiB of memory: a job in a machine may have at most 4096 here"),
        ((1, MIB, 11 * GIB), "11264 MiB of disk: a job in a machine may have at most 10240 here"),
    ],
)
def test_more_than_the_site_gives_is_told_with_both_numbers(asked: tuple[int | None, ...], message: str) -> None:
    with pytest.raises(OverLimit, match=message):
        check_limits(*asked, Settings(max_cpus=8, max_memory=4 * GIB, max_disk=10 * GIB))


def test_without_limits_and_without_wishes_anything_goes() -> None:
    check_limits(1 << 20, 1 << 60, 1 << 60, Settings())
    check_limits(None, None, None, Settings(max_cpus=1, max_memory=1, max_disk=1))


# -- sizes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "space"), [(200 * MIB, -1), (1, -1), (479 * MIB, -1), (None, 703 * MIB), (GIB, 703 * MIB)]
)
def test_too_little_memory_is_refused_with_what_would_do(limit: int | None, space: int) -> None:
    with pytest.raises(OverLimit, match=r"MiB of memory: a job in a machine needs at least \d+ MiB"):
        guest_memory(limit, space, Settings(), 512 * MIB)


@given(st.integers(480 * MIB, 1 << 42), st.integers(0, GIB), st.floats(0, 30))
def test_the_guest_and_its_overhead_fit_into_the_limit(limit: int, least: int, percent: float) -> None:
    settings = Settings(overhead=least, overhead_percent=percent)
    if limit - overhead(limit, settings) < SMALLEST_GUEST:
        return
    size = guest_memory(limit, -1, settings, 0)
    assert SMALLEST_GUEST <= size <= limit - overhead(limit, settings)
    assert size >= (limit - overhead(limit, settings)) * 31 // 32 - 2 * MIB


@given(st.integers(SMALLEST_GUEST, 1 << 44))
def test_sizes_fall_on_few_steps_in_whole_large_pages(size: int) -> None:
    cut = rounded(size)
    assert cut <= size and cut % (2 * MIB) == 0 and rounded(cut) == cut


def test_without_limits_the_guest_gets_the_sites_default() -> None:
    assert guest_memory(None, -1, Settings(), 512 * MIB) == 512 * MIB


def test_a_limit_on_virtual_memory_binds_qemu_too() -> None:
    assert guest_memory(None, 2 * GIB, Settings(), 4 * GIB) == rounded(2 * GIB - ADDRESS_SPACE)
    assert guest_memory(GIB, 64 * GIB, Settings(), 4 * GIB) == rounded(GIB - 224 * MIB)


def test_a_limit_on_data_counts_qemus_own_too() -> None:
    assert guest_memory(GIB, -1, Settings(), 4 * GIB, data=GIB) == rounded(GIB - DATA_SPACE)
    assert guest_memory(8 * GIB, -1, Settings(), 4 * GIB, data=16 * GIB) == rounded(8 * GIB - 8 * GIB * 5 // 100)
    with pytest.raises(OverLimit, match="350 MiB of memory: a job in a machine needs at least 544 MiB"):
        guest_memory(400 * MIB, -1, Settings(), GIB, data=350 * MIB)


# -- environment ---------------------------------------------------------------------------------------------------------


def test_what_is_about_the_host_stays_there() -> None:
    names = [
        "LD_PRELOAD", "LD_LIBRARY_PATH", "DBUS_SESSION_BUS_ADDRESS", "XDG_RUNTIME_DIR", "SSH_AUTH_SOCK", "DISPLAY", "BELLJAR_PATHS_RUN",
    ]  # fmt: skip
    assert for_guest(tuple((name.encode(), b"x") for name in names), Settings(), ()) == ()


def test_the_jobs_and_its_schedulers_variables_go_in_as_they_are_and_in_order() -> None:
    env = (
        (b"SLURM_JOB_ID", b"4711"), (b"B", b"two\nlines"), (b"A", b"\xff\x01'\""), (b"EMPTY", b""), (b"BASH_FUNC_x%%", b"() { :; }"),
        (b"PBS_O_PATH", b"/opt/x"), (b"LDFLAGS", b"-lm"), (b"_", b"/bin/x"), (b"SGE_ROOT", b"/r"), (b"LSB_JOBID", b"1"), (b"_CONDOR_SLOT", b"1"),
    )  # fmt: skip
    assert for_guest(env, Settings(), ()) == env


def test_a_site_keeps_and_drops_what_it_wants() -> None:
    settings = Settings(keep_env=("LD_LIBRARY_PATH",), drop_env=("SECRET_*", "TOKEN"))
    env = tuple((name, b"x") for name in (b"LD_LIBRARY_PATH", b"LD_PRELOAD", b"SECRET_A", b"TOKEN", b"TOKENS"))
    assert [name for name, _ in for_guest(env, settings, ())] == [b"LD_LIBRARY_PATH", b"TOKENS"]


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        (b"/opt/slurm/bin:/usr/bin:/bin", b"/usr/bin:/bin"),
        (b"/home/bob/bin:/opt/x:/bin", b"/home/bob/bin:/bin"),
        (b"/homework/bin:/bin", b"/bin"),
        (b"/opt/x", b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
        (b".:/bin", b".:/bin"),
        (b"", b":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
    ],
)
def test_a_search_path_keeps_what_the_guest_has(path: bytes, inside: bytes) -> None:
    assert for_guest(((b"PATH", path),), Settings(), ("/home/",)) == ((b"PATH", inside),)


# -- dialects ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_a_dialect_keeps_nothing_of_a_job(name: str) -> None:
    """What belongs to a job is in its value: two jobs of one process do not meet."""
    assert vars(load(name).dialect) == {}


# -- verdict -------------------------------------------------------------------------------------------------------------

JOB = Job("slurm", "1")
DONE = Outcome("m", Cause.FINISHED, OutcomeClass.PAYLOAD, exit_code=0)


def outcome(cause: Cause, klass: OutcomeClass, **changes: object) -> Outcome:
    return replace(DONE, cause=cause, klass=klass, exit_code=None, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("end", "tries", "verdict"),
    [
        (DONE, 1, Verdict.MIRROR),
        (replace(DONE, exit_code=99), 1, Verdict.MIRROR),
        (replace(DONE, exit_code=None, signal=9, cause=Cause.GUEST_OOM), 1, Verdict.MIRROR),
        (outcome(Cause.CANCELLED, OutcomeClass.CANCELLED, signal=15), 1, Verdict.MIRROR),
        (outcome(Cause.WALLTIME, OutcomeClass.WALLTIME, signal=9), 5, Verdict.MIRROR),
        (outcome(Cause.REFUSED, OutcomeClass.USER), 1, Verdict.FAIL),
        (outcome(Cause.IMAGE_FAULT, OutcomeClass.USER), 1, Verdict.FAIL),
        (outcome(Cause.BOOT_FAILED, OutcomeClass.TRANSIENT), 1, Verdict.REQUEUE),
        (outcome(Cause.NODE_FAULT, OutcomeClass.NODE), 2, Verdict.REQUEUE),
        (outcome(Cause.BOOT_FAILED, OutcomeClass.TRANSIENT), 3, Verdict.HOLD),
        (outcome(Cause.NODE_FAULT, OutcomeClass.NODE), 70, Verdict.HOLD),
        (outcome(Cause.GUEST_LOST, OutcomeClass.TRANSIENT), 1, Verdict.REQUEUE),
        (replace(DONE, cause=Cause.NODE_FAULT, klass=OutcomeClass.NODE), 1, Verdict.FAIL),
    ],
)
def test_the_verdict(end: Outcome, tries: int, verdict: Verdict) -> None:
    assert judge(end, JOB, tries, Settings()) is verdict


def test_what_had_begun_is_run_again_only_where_its_system_would() -> None:
    lost = outcome(Cause.GUEST_LOST, OutcomeClass.TRANSIENT, phases={"boot": 1.0, "run": 2.0})
    assert judge(lost, replace(JOB, reruns=False), 1, Settings()) is Verdict.FAIL
    assert judge(lost, replace(JOB, reruns=True), 1, Settings()) is Verdict.REQUEUE
    assert judge(replace(lost, phases={"boot": 1.0}), replace(JOB, reruns=False), 1, Settings()) is Verdict.REQUEUE


@pytest.mark.parametrize("retries", [0, 1])
def test_the_bound_holds_for_sites_that_want_no_second_try(retries: int) -> None:
    end = outcome(Cause.BOOT_FAILED, OutcomeClass.TRANSIENT)
    assert judge(end, JOB, 1, Settings(retries=retries)) is Verdict.HOLD


def test_reasons_are_one_harmless_line() -> None:
    end = outcome(Cause.BOOT_FAILED, OutcomeClass.TRANSIENT, reason="a\n\x1b[2J" + "x" * 500)
    text = why(end, 2, Verdict.REQUEUE, Settings())
    assert text.startswith("belljar: try 2 of 3: a??[2Jxxx") and len(text) == 200 and text.isprintable()


def test_the_delay_doubles_and_has_an_end() -> None:
    assert [delay(n, Settings(retry_delay=30)) for n in (1, 2, 3)] == [30, 60, 120]
    assert delay(500, Settings()) == 86400
