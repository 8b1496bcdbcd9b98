"""Import asyncio without ssl. Import this before asyncio where start-up time counts.

asyncio takes ssl along when it can be imported, and does without when it cannot. No event loop of the job path ever
speaks TLS, and ssl alone is a tenth of what the whole command imports (docs/decisions/0007-the-hot-path.md).
"""

from __future__ import annotations

import sys

if "asyncio" not in sys.modules and "ssl" not in sys.modules:
    sys.modules["ssl"] = None  # type: ignore[assignment]
    import asyncio

    del sys.modules["ssl"]
    assert asyncio
