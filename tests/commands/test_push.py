"""`nufilt push`, against a stand-in for the hub."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest

from tests.commands.helpers import nufilt
from tests.folders.helpers import merge, save_stream
from tests.models import llama


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as an upload needs; what is committed ends in ``server.files``."""

    def log_message(self, *args):
        pass

    def _answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self):
        self._answer({"id": "someone/merged", "siblings": [], "sha": "0" * 40})

    def do_PUT(self):
        data = self._body()
        self.server.blobs[hashlib.sha256(data).hexdigest()] = data
        self._answer({})

    def do_POST(self):
        body, url = self._body(), f"http://{self.headers['Host']}"
        if self.headers.get("Authorization") != "Bearer hf_token":
            self._answer({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            self.server.created = json.loads(body)
            self._answer({"url": f"{url}/someone/merged"})
        elif self.path == "/api/validate-yaml":
            wrong = re.search(r'^base_model: "(?!\w+/\w+")', json.loads(body)["content"], flags=re.M)
            errors = [{"message": '"base_model" is not valid. Use a model id'}] if wrong else []
            self._answer({"errors": errors, "warnings": []}, 400 if errors else 200)
        elif "/preupload/" in self.path:
            modes = [
                {"path": file["path"], "uploadMode": "lfs" if ".safetensors" in file["path"] else "regular"}
                for file in json.loads(body)["files"]
            ]
            self._answer({"files": [mode | {"shouldIgnore": False, "oid": None} for mode in modes]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            action = {"upload": {"href": f"{url}/blob", "header": {}}}
            self._answer({"transfer": "basic", "objects": [each | {"actions": action} for each in objects]})
        else:
            assert "/commit/" in self.path
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "lfsFile":
                    self.server.files[line["value"]["path"]] = self.server.blobs[line["value"]["oid"]]
            self._answer({"commitUrl": f"{url}/commit", "commitOid": "0" * 40, "hookOutput": ""})


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.blobs, server.files, server.created = {}, {}, None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    yield server
    server.shutdown()
    server.server_close()


def test_a_result_is_uploaded_whole(hub, tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    out = merge(tmp_path, ["task1"])
    code, text = nufilt("push", out, "someone/merged", "--private")
    assert code == 0, text
    assert text.strip().endswith("/someone/merged")
    assert (hub.created["name"], hub.created["private"]) == ("merged", True)
    files = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert hub.files == files
    assert {"README.md", "nufilt.json"} < set(hub.files)


def test_only_what_nufilt_merge_made_is_uploaded(hub, tmp_path):
    code, text = nufilt("push", tmp_path, "someone/merged")
    assert (code, "it has no nufilt.json" in text) == (1, True)
    assert hub.created is None


@pytest.mark.parametrize(("token", "repo"), [("hf_other", "someone/merged"), ("hf_token", "some one/merged")])
def test_what_the_hub_refuses_is_one_line(hub, tmp_path, monkeypatch, token, repo):
    monkeypatch.setenv("HF_TOKEN", token)
    (tmp_path / "nufilt.json").write_text("{}")
    code, text = nufilt("push", tmp_path, repo)
    assert (code, "error: " in text, "Traceback" in text) == (1, True, False), text
    assert not hub.files
