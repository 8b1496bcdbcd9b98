"""Tasks beside what somebody does."""

import asyncio

from belljar.host.streams import Works


async def test_all_end_together_and_only_a_defect_is_told() -> None:
    told: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))

    async def fails(how: Exception) -> None:
        raise how

    works, defect = Works(OSError), ValueError("a defect")
    for work in (fails(OSError("the other side is gone")), fails(defect), asyncio.sleep(600)):
        works.begin(work)
    assert len(works) == 3
    await asyncio.sleep(0.01)
    assert (len(works), told) == (1, [defect])
    works.begin(asyncio.sleep(600))  # it has not begun yet
    await works.end()
    assert (len(works), told) == (0, [defect])
