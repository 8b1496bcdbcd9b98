"""What is left out of an import is there as soon as somebody wants it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from belljar.host.quick_imports import NEWEST

LEFT_OUT = {
    "asyncio": {
        "ssl",
        "concurrent.futures",
        "inspect",
        "logging",
        "traceback",
        "linecache",
        "locale",
        "asyncio.sslproto",
        "typing",
    },
    "argparse": {"gettext", "locale"},
    "pathlib": {"urllib.parse", "ipaddress"},
    "tomllib": {"string", "datetime", "typing"},
}


def said(code: str) -> str:
    script = f"import sys; sys.path[:] = {sys.path!r}\n{textwrap.dedent(code)}"
    done = subprocess.run([sys.executable, "-IS", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_what_a_job_never_meets_is_left_out() -> None:
    bare = set(said("print(*sys.modules)").split())
    for module, absent in LEFT_OUT.items():
        there = said(f"from belljar.host.quick_imports import quickly; quickly({module!r}); print(*sys.modules)")
        assert not absent & set(there.split()) - bare, module


def test_a_python_whose_imports_nobody_has_looked_at_imports_as_it_does_by_itself() -> None:
    there = said("""
        sys.version_info = (3, 99, 0)
        from belljar.host.quick_imports import quickly
        quickly("pathlib"); quickly("asyncio")
        print(*sys.modules)
    """)
    assert {"inspect", "logging"} <= set(there.split())


def test_this_python_is_one_whose_imports_were_looked_at() -> None:
    """Red on a new Python: run these tests with it, mend what they show, then raise NEWEST."""
    assert sys.version_info[:2] <= NEWEST


def test_what_is_needed_after_all_is_imported_then() -> None:
    assert "Traceback" in said("""
        from belljar.host import quick_asyncio
        import asyncio
        async def fail():
            raise ValueError("lost")
        async def main():
            asyncio.ensure_future(fail())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        asyncio.run(main())
    """)
    assert (
        said("""
        from belljar.host.quick_imports import quickly
        quickly("pathlib"); quickly("asyncio"); quickly("argparse"); quickly("tomllib")
        import tomllib
        assert tomllib.loads("a-Z9 = 0x1F")["a-Z9"] == 31
        then = tomllib.loads("a = 2026-11-22T18:00:00Z\\nb = 2026-11-22\\nc = 18:00:00\\nd = 2026-11-22T18:00:00+01:00")
        import datetime
        assert then["a"] == datetime.datetime(2026, 11, 22, 18, tzinfo=datetime.timezone.utc) > then["d"]
        assert (then["b"], then["c"]) == (datetime.date(2026, 11, 22), datetime.time(18))
        import asyncio, inspect, logging, pathlib, traceback, urllib.parse
        assert inspect.iscoroutinefunction(asyncio.sleep) and not hasattr(inspect, "nothing")
        assert logging.getLogger("asyncio").name == asyncio.log.logger.name
        assert urllib.parse.quote("a b") == "a%20b" and traceback.format_exc and asyncio.base_events.sslproto.SSLProtocol
        assert asyncio.run(asyncio.to_thread(int, "5")) == 5
        import concurrent.futures
        for name in ("ALL_COMPLETED", "FIRST_COMPLETED", "FIRST_EXCEPTION"):
            assert getattr(asyncio, name) == getattr(concurrent.futures, name)
        assert concurrent.futures.ThreadPoolExecutor and concurrent.futures is sys.modules["concurrent.futures"]
        print(pathlib.Path("/a b").as_uri())
    """)
        == "file:///a%20b\n"
    )


def test_a_loop_that_is_debugged_knows_where_a_future_was_made() -> None:
    assert "this_function" in said("""
        from belljar.host import quick_asyncio
        import asyncio
        async def this_function():
            print(asyncio.get_running_loop().create_future()._source_traceback)
        asyncio.run(this_function(), debug=True)
    """)


def test_a_handler_of_a_signal_is_still_judged() -> None:
    assert "TypeError" in said("""
        from belljar.host import quick_asyncio
        import asyncio
        async def handler(): ...
        async def main():
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(10, print)
            assert "inspect" not in sys.modules
            try:
                loop.add_signal_handler(10, handler)
            except TypeError:
                print("TypeError")
        asyncio.run(main())
    """)


def test_a_regular_expression_is_compiled_when_it_is_first_used() -> None:
    assert (
        said("""
        import re
        real, made = re._compiler.compile, []
        re._compiler.compile = lambda pattern, flags=0: made.append(pattern) or real(pattern, flags)
        from belljar.host.quick_imports import quickly
        quickly("json"); quickly("tomllib")
        import json, tomllib
        assert made == [], made
        assert json.loads(' {"a": [1.5, "\\\\u00e4"]}\\n') == {"a": [1.5, "ä"]}
        assert json.dumps("ä\\n") == '"\\\\u00e4\\\\n"' and json.decoder.WHITESPACE.pattern.startswith("[")
        assert tomllib.loads('a = "b"') == {"a": "b"} and tomllib._re.RE_NUMBER.pattern
        assert re.compile("x").match("x"), "others compile as ever"
        print(len(made) > 0)
    """)
        == "True\n"
    )


def test_what_asyncio_tells_of_processes_is_what_subprocess_says() -> None:
    assert (
        said("""
        from belljar.host import quick_asyncio
        import asyncio, sys
        assert "subprocess" not in sys.modules
        async def main():
            child = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(5)", stdout=asyncio.subprocess.PIPE)
            return (await child.communicate())[0]
        print(asyncio.run(main()))
        import subprocess
        for name in ("PIPE", "STDOUT", "DEVNULL"):
            assert getattr(subprocess, name) == getattr(asyncio.subprocess, name)
    """)
        == "b'5\\n'\n"
    )
