"""Our verifier against botocore's signer and libcloud's, and against whoever is not who they say."""

import hashlib
import hmac
import re
from base64 import b64encode
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from botocore.auth import SigV4Auth, SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given, settings
from hypothesis import strategies as st
from libcloud.common.aws import AWSRequestSignerAlgorithmV2

from belljar.lease.ec2.refusals import Refused
from belljar.lease.ec2.request import check_signature, fields_of, key_of
from belljar.service.http.server import Sent

KEY, SECRET = "BJAAAAAAAAAAAAAAAAAA", "secret/+secret"
TEXTS = st.text(st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="\ufffe\uffff"), max_size=30)
NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9]{0,12}(\.[1-9A-Z][a-z]{0,8}){0,3}", fullmatch=True)
PARAMETERS = st.dictionaries(
    NAMES.filter(lambda one: not one.startswith(("X-", "Signature", "AWS"))), TEXTS, max_size=8
)
HOSTS = st.sampled_from(["localhost:8444", "ec2.lab.example", "[::1]:8444", "127.0.0.1"])
REGIONS = st.sampled_from(["lab", "us-east-1", "0"])


def form(parameters: dict[str, str]) -> str:
    return "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in parameters.items())


def sent(request: Any) -> Sent:
    parts = urlsplit(request.url)
    headers = {name.lower(): str(value) for name, value in request.headers.items()} | {"host": parts.netloc}
    body = request.body.encode() if isinstance(request.body, str) else request.body or b""
    return Sent(request.method, f"{parts.path or '/'}?{parts.query}", tuple(headers.items()), body)


def posted(
    parameters: dict[str, str], host: str = "ec2.lab:8444", secret: str = SECRET, region: str = "lab", key: str = KEY,
    **more: str,
) -> Sent:  # fmt: skip
    headers = {"Content-Type": "application/x-www-form-urlencoded; charset=utf-8", **more}
    request = AWSRequest("POST", f"http://{host}/", headers=headers, data=form(parameters))
    SigV4Auth(Credentials(key, secret), "ec2", region).add_auth(request)
    return sent(request.prepare())


def presigned(
    parameters: dict[str, str], host: str = "ec2.lab:8444", expires: int = 3600, secret: str = SECRET
) -> Sent:
    request = AWSRequest("GET", f"http://{host}/?{form(parameters)}")
    SigV4QueryAuth(Credentials(KEY, secret), "ec2", "lab", expires=expires).add_auth(request)
    return sent(request.prepare())


def who(one: Sent, *, secret: Callable[[str], str | None] = {KEY: SECRET}.get, later: float = 0.0) -> str:
    fields = fields_of(one)
    key = key_of(one, fields)
    check_signature(one, fields, secret(key), datetime.now(UTC).timestamp() + later)
    return key


def refused(one: Sent, **more: Any) -> str:
    with pytest.raises(Refused) as caught:
        who(one, **more)
    return caught.value.code


def changed(one: Sent, **facts: Any) -> Sent:
    return Sent(**{**vars(one), **facts})


def with_header(one: Sent, name: str, value: str | None) -> Sent:
    rest = tuple(pair for pair in one.headers if pair[0] != name)
    return changed(one, headers=rest if value is None else (*rest, (name, value)))


# -- agreement ---------------------------------------------------------------------------------------------------------


@given(PARAMETERS, HOSTS, REGIONS)
@settings(max_examples=60, deadline=None)
def test_what_botocore_signs_in_a_header_is_taken(parameters: dict[str, str], host: str, region: str) -> None:
    one = posted(parameters, host, region=region)
    assert fields_of(one) == parameters
    assert who(one) == KEY


@given(PARAMETERS, HOSTS)
@settings(max_examples=60, deadline=None)
def test_what_botocore_signs_in_a_query_is_taken(parameters: dict[str, str], host: str) -> None:
    one = presigned(parameters, host)
    assert {name: value for name, value in fields_of(one).items() if not name.startswith("X-Amz-")} == parameters
    assert who(one) == KEY


@given(PARAMETERS, PARAMETERS)
@settings(max_examples=60, deadline=None)
def test_a_signature_is_for_these_parameters_and_no_others(parameters: dict[str, str], others: dict[str, str]) -> None:
    if parameters != others:
        assert refused(changed(posted(parameters), body=form(others).encode())) == "SignatureDoesNotMatch"


class _Connection:
    host, port, secure = "ec2.lab", 8444, False


@given(PARAMETERS)
@settings(max_examples=60, deadline=None)
def test_what_libcloud_signs_by_version_2_is_taken(parameters: dict[str, str]) -> None:
    one = version_2(parameters)
    assert who(one) == KEY
    assert refused(changed(one, target=one.target + "&More=1")) == "SignatureDoesNotMatch"


def version_2(parameters: dict[str, str], secret: str = SECRET) -> Sent:
    signing = AWSRequestSignerAlgorithmV2(KEY, secret, "2016-11-15", _Connection())
    found = signing.get_request_params(params=dict(parameters), method="GET", path="/")
    return Sent("GET", f"/?{form(found)}", (("host", "ec2.lab:8444"),))


@st.composite
def harmed(draw: st.DrawFn, one: Sent) -> Sent:
    """One byte of what was signed, or of the signature, is another."""
    parts = [
        ("host", ""),
        ("x-amz-date", ""),
        ("authorization", "Signature="),
        ("target", "X-Amz-Signature="),
        ("target", "A.0="),
        ("body", "A.0="),
    ]
    name, behind = draw(
        st.sampled_from([(name, behind) for name, behind in parts if behind in text_of(one, name) != ""])
    )
    text = text_of(one, name)
    # `%2f` is `%2F`, and `+` is `%20`: what is another byte must be another text, too.
    begin = text.index(behind) + len(behind)
    place = draw(
        st.sampled_from([at for at in range(begin, len(text)) if text[at].isalnum() and "%" not in text[at - 2 : at]])
    )
    other = draw(st.sampled_from("abcxyz0189"))
    # No filter: a signature is another one each second, what is drawn is not.
    other = "Q" if other == text[place] else other
    changed_ = f"{text[:place]}{other}{text[place + 1 :]}"
    if name == "target":
        return changed(one, target=changed_)
    return changed(one, body=changed_.encode()) if name == "body" else with_header(one, name, changed_)


def text_of(one: Sent, name: str) -> str:
    return one.target if name == "target" else one.body.decode() if name == "body" else one.header(name) or ""


def taken_whole_and_refused_harmed(examples: int) -> None:
    @given(PARAMETERS, HOSTS, REGIONS, st.data())
    @settings(max_examples=examples, deadline=None)
    def both(parameters: dict[str, str], host: str, region: str, data: st.DataObject) -> None:
        for one in (
            posted({"A.0": "x", **parameters}, host, region=region),
            presigned({"A.0": "x", **parameters}, host),
        ):
            assert who(one) == KEY
            with pytest.raises(Refused):
                who(data.draw(harmed(one)))

    both()


def test_one_changed_byte_and_it_is_nobodys() -> None:
    taken_whole_and_refused_harmed(100)


@pytest.mark.slow
def test_ten_thousand_random_requests_that_botocore_signs_are_taken_and_with_a_changed_byte_refused() -> None:
    taken_whole_and_refused_harmed(5000)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_stranger_and_a_wrong_secret_are_told_apart_as_amazon_does() -> None:
    assert refused(posted({}), secret=lambda key: None) == "AuthFailure"
    assert refused(posted({}, secret="guess")) == "SignatureDoesNotMatch"
    assert refused(Sent("GET", "/?Action=DescribeInstances", ())) == "MissingAuthenticationToken"


@pytest.mark.parametrize(("minutes", "code"), [(14, ""), (-14, ""), (16, "RequestExpired"), (-16, "RequestExpired")])
def test_clocks_may_be_a_quarter_of_an_hour_apart(minutes: int, code: str) -> None:
    for one in (posted({"A": "1"}), version_2({"A": "1"})):
        assert (who(one, later=minutes * 60) == KEY) if not code else (refused(one, later=minutes * 60) == code)


def test_a_presigned_request_ends_when_it_says() -> None:
    assert who(presigned({}, expires=3600), later=3590) == KEY
    assert refused(presigned({}, expires=3600), later=3610) == "RequestExpired"
    assert refused(presigned({}), later=-1000) == "RequestExpired"
    assert refused(presigned({}, expires=700000)) == "IncompleteSignature"
    one = presigned({"Action": "DescribeRegions"})
    assert refused(changed(one, target=one.target.replace("Expires=3600", "Expires=7200"))) == "SignatureDoesNotMatch"
    assert refused(changed(one, body=b"x=1", method="POST")) == "SignatureDoesNotMatch"


def test_a_request_for_another_host_is_none_for_us() -> None:
    assert refused(with_header(posted({}), "host", "other.example")) == "SignatureDoesNotMatch"
    assert refused(with_header(version_2({}), "host", "other.example:8444")) == "SignatureDoesNotMatch"
    one = posted({})
    words = dict(one.headers)["authorization"].replace("host;", "")
    assert refused(with_header(one, "authorization", words)) == "IncompleteSignature"


def test_signed_headers_are_those_that_came() -> None:
    one = posted({}, **{"X-Custom": "a   b"})
    assert "x-custom" in dict(one.headers)["authorization"]
    assert who(with_header(one, "x-custom", " a b ")) == KEY
    assert refused(with_header(one, "x-custom", "c")) == "SignatureDoesNotMatch"
    assert refused(with_header(one, "x-custom", None)) == "SignatureDoesNotMatch"


def test_a_stated_digest_is_that_of_the_body() -> None:
    one = posted({"A": "1"})
    assert who(with_header(one, "x-amz-content-sha256", hashlib.sha256(one.body).hexdigest())) == KEY
    assert refused(with_header(one, "x-amz-content-sha256", "UNSIGNED-PAYLOAD")) == "SignatureDoesNotMatch"


@pytest.mark.parametrize(
    ("pattern", "instead"),
    [
        (r"AWS4-HMAC-SHA256", "AWS4-HMAC-MD5"), (r"Signature=\w+", ""), (r"Signature=(\w{40})\w+", r"Signature=\1"),
        (r"Credential=[^/]+/", "Credential="), (r"Credential=[^,]+", "Credential=" + "/" * 40), (r"aws4_request", "aws5_request"),
        (r"/\d{8}/", "/20200101/"), (r"SignedHeaders=[^,]+", "SignedHeaders="), (r"host;", "host;host;"),
        (r"Credential=BJA", "Credential=" + "B" * 5000), (r".*", ""), (r".*", "Basic YTpi"),
    ],
)  # fmt: skip
def test_a_mangled_header_is_refused(pattern: str, instead: str) -> None:
    one = posted({"Action": "DescribeInstances"})
    words = re.sub(pattern, instead, dict(one.headers)["authorization"], count=1)
    assert refused(with_header(one, "authorization", words)) in (
        "IncompleteSignature",
        "SignatureDoesNotMatch",
        "AuthFailure",
    )


@given(st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=200), st.text(max_size=40))
@settings(max_examples=60, deadline=None)
def test_no_words_of_a_stranger_are_a_signature(words: str, moment: str) -> None:
    one = with_header(with_header(posted({}), "authorization", words), "x-amz-date", moment)
    with pytest.raises(Refused):
        who(one)


def test_version_2_has_one_moment_and_a_known_digest() -> None:
    one = version_2({})
    more = (datetime.now(UTC) + timedelta(seconds=60)).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert refused(changed(one, target=f"{one.target}&Expires={quote(more)}")) == "IncompleteSignature"
    assert refused(changed(one, target=one.target.replace("HmacSHA256", "HmacMD5"))) == "IncompleteSignature"
    assert (
        refused(changed(one, target=one.target.replace("SignatureVersion=2", "SignatureVersion=1")))
        == "IncompleteSignature"
    )
    assert refused(changed(one, target=re.sub("Timestamp=[^&]+", "Timestamp=now", one.target))) == "IncompleteSignature"


def test_version_2_may_name_its_end_within_a_week() -> None:
    for days, expected in ((1, ""), (8, "RequestExpired")):
        end = (datetime.now(UTC) + timedelta(days=days)).strftime("%Y-%m-%dT%H:%M:%SZ")
        asked = {"AWSAccessKeyId": KEY, "Expires": end, "SignatureMethod": "HmacSHA256", "SignatureVersion": "2"}
        words = "&".join(f"{name}={quote(asked[name], safe='')}" for name in sorted(asked))
        text = f"GET\nec2.lab:8444\n/\n{words}"
        asked["Signature"] = b64encode(hmac.digest(SECRET.encode(), text.encode(), "sha256")).decode()
        one = Sent("GET", f"/?{form(asked)}", (("host", "ec2.lab:8444"),))
        assert (refused(one) if expected else who(one)) == (expected or KEY)
