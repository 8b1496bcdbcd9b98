"""The metadata service as a payload in a clone finds it: the same guard, the same answers, for any user of the guest."""

import json
from pathlib import Path

from tests.live.conftest import Belljar

PAYLOAD = """
import http.client, json, os, socket, threading, urllib.request
found = {"joboutputs": os.environ["JOBOUTPUTS"]}
def get(path, host="169.254.169.254"):
    with urllib.request.urlopen("http://%s%s" % (host, path), timeout=60) as answer:
        return answer.read().decode("latin-1")
def put(name, body, **headers):
    one = http.client.HTTPConnection("169.254.169.253", timeout=60)
    one.request("PUT", "/joboutputs/" + name, body, headers)
    return one.getresponse().status
found["user_data"] = get("/latest/user-data") == get("/openstack/latest/user_data") and get("/latest/user-data")
found["id"] = get("/jobfeatures/job_id", "169.254.169.253")
found["same"] = get("/jobfeatures/jobstart_secs") == open("/etc/jobfeatures/jobstart_secs").read()
found["kept"] = put("result", b"x" * 300000)
found["climbs"] = [put("%2e%2e/x", b"x"), put("a/b", b"x"), put(".x", b"x")]
one = http.client.HTTPConnection("169.254.169.253", timeout=60)
one.putrequest("PUT", "/joboutputs/big"); one.putheader("Content-Length", str(10 << 30)); one.endheaders(b"x" * 65536)
found["big"] = one.getresponse().status
sockets = [socket.create_connection(("169.254.169.254", 80), timeout=60) for _ in range(20)]
found["many"] = get("/latest/meta-data/instance-id") == json.loads(get("/openstack/latest/meta_data.json"))["uuid"]
try:
    socket.create_connection(("169.254.169.252", 80), timeout=60)
except OSError as exc:
    found["beside"] = exc.strerror
print(json.dumps(found))
"""


def test_a_payload_finds_its_user_data_and_leaves_files(belljar: Belljar, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"for ##user_data_machine_hostname##\xff\n")
    done = belljar.run("--network", "user", "--user-data", str(tmp_path / "data"), "--", "python3", "-c", PAYLOAD)
    assert done.returncode == 0, done.stderr.decode()
    (machine,) = [path.name for path in belljar.logs.iterdir() if len(path.name) == 12]
    assert json.loads(done.stdout) == {
        "joboutputs": "http://169.254.169.253/joboutputs", "user_data": f"for belljar-{machine}\xff\n", "id": machine, "same": True,
        "kept": 201, "climbs": [400, 403, 403], "big": 413, "many": True, "beside": "Network is unreachable",
    }  # fmt: skip
    assert belljar("logs", machine, "--joboutput", "result").stdout == b"x" * 300000
    outcome = json.loads((belljar.logs / machine / "outcome.json").read_text())
    assert (outcome["start"], outcome["context"]) == ("clone", "ramdisk")
    assert belljar.leftovers() == []
