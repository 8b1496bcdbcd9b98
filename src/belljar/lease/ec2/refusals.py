"""Refusals, as EC2 names them: a code that programs act on, a sentence for people, and an HTTP status."""

from __future__ import annotations

import re
from xml.sax.saxutils import escape

from belljar.errors import BelljarError, LeaseDenied

# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html; any other code is 400.
STATUS = {
    "AuthFailure": 401, "MissingAuthenticationToken": 403, "SignatureDoesNotMatch": 403, "UnauthorizedOperation": 403,
    "DryRunOperation": 412, "RequestEntityTooLarge": 413, "InternalError": 500, "RequestLimitExceeded": 503, "Unavailable": 503,
}  # fmt: skip
# What the service refuses, by the names of its errors; a denial has its own code.
CODES = {
    "OverLimit": "InvalidParameterValue", "BadRequest": "InvalidParameterValue",
    "NoSuchKeyPair": "InvalidKeyPair.NotFound", "KeyPairExists": "InvalidKeyPair.Duplicate", "NoSuchLease": "InvalidInstanceID.NotFound",
    "MachineBusy": "IncorrectInstanceState", "RecordsLost": "Unavailable", "NoSpace": "Unavailable",
}  # fmt: skip
# What XML 1.0 cannot say cannot be answered either.
UNSPEAKABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Refused(Exception):
    """A request that is not done; nothing of it was."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message

    @property
    def status(self) -> int:
        return STATUS.get(self.code, 400)

    def xml(self, request_id: str) -> bytes:
        """The answer's body. A refusal spells RequestID in capitals, an answer does not."""
        return (
            '<?xml version="1.0" encoding="UTF-8"?>\n<Response><Errors><Error>'
            f"<Code>{escape(self.code)}</Code><Message>{escape(self.message)}</Message>"
            f"</Error></Errors><RequestID>{request_id}</RequestID></Response>"
        ).encode()


def refused(error: Exception) -> Refused | None:
    """What EC2 would say for it; None: nothing, it is not a refusal."""
    code = error.code if isinstance(error, LeaseDenied) else CODES.get(type(error).__name__)
    if code is None or not isinstance(error, BelljarError):
        return None
    return Refused(code, "The service is not available now: try again." if code == "Unavailable" else error.message)
