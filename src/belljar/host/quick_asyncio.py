"""Import this before asyncio where start-up time counts."""

from belljar.host.quick_imports import quickly

quickly("asyncio")
