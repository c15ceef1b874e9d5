"""`nufilt push`, against a stand-in for the hub."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

from tests.commands.helpers import nufilt
from tests.merge.helpers import change_json, merge, save_stream
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
            wrong = re.search(
                r'^base_model: "(?!\w+/\w+")', json.loads(body)["content"], flags=re.M
            )
            errors = [{"message": '"base_model" is not valid. Use a model id'}] if wrong else []
            self._answer({"errors": errors, "warnings": []}, 400 if errors else 200)
        elif "/preupload/" in self.path:
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if ".safetensors" in file["path"] else "regular",
                }
                for file in json.loads(body)["files"]
            ]
            self._answer({"files": [mode | {"shouldIgnore": False, "oid": None} for mode in modes]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            action = {"upload": {"href": f"{url}/blob", "header": {}}}
            self._answer(
                {"transfer": "basic", "objects": [each | {"actions": action} for each in objects]}
            )
        else:
            assert "/commit/" in self.path
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(
                        line["value"]["content"]
                    )
                elif line["key"] == "lfsFile":
                    self.server.files[line["value"]["path"]] = self.server.blobs[
                        line["value"]["oid"]
                    ]
            self._answer(
                {
                    "commitUrl": f"{url}/someone/merged/commit/{'0' * 40}",
                    "commitOid": "0" * 40,
                    "hookOutput": "",
                }
            )


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.blobs, server.files, server.created = {}, {}, None
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(
        huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}"
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", "/nowhere")
    monkeypatch.setattr(
        huggingface_hub.constants, "HF_HUB_DISABLE_XET", True
    )  # the stand-in speaks LFS alone
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def out(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    return merge(tmp_path, ["task1"], method="spectral")


def test_exactly_what_was_merged_is_uploaded(hub, out, tmp_path):
    files = {
        str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()
    }
    files["README.md"] = b"# My model"
    (out / "README.md").write_bytes(files["README.md"])
    (tmp_path / "secret").write_text("mine")
    for name in (".env", "run1/optimizer.pt", "nufilt_state/notes.txt"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    (out / "more.safetensors").symlink_to(tmp_path / "secret")
    code, text = nufilt("push", out, "someone/merged", "--private")
    assert code == 0, text
    assert text.strip().endswith("/someone/merged")
    assert hub.created["name"] == "merged"
    assert (
        hub.created.get("private") or hub.created["visibility"] == "private"
    )  # as huggingface_hub 2 says it
    assert hub.files == files
    assert {"README.md", "nufilt.json", "nufilt_state/model.safetensors"} < set(hub.files)


def link_outside(file):
    file.rename(file.parents[1] / "elsewhere")
    file.symlink_to(file.parents[1] / "elsewhere")


def list_more(file):
    content = json.loads(file.read_text())
    del content["digest"]
    content["files"] |= {"../base/config.json": content["files"]["config.json"]}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps({**content, "digest": digest}))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("config.json", Path.unlink, "lacks config.json; merge again"),
        (
            "config.json",
            lambda file: file.write_text("{}"),
            "config.json is not what was saved (its size differs)",
        ),
        (
            "config.json",
            lambda file: file.write_bytes(bytes(file.stat().st_size)),
            "(its sha256 differs)",
        ),
        ("config.json", link_outside, "config.json' is a link to"),
        ("README.md", link_outside, "README.md' is a link to"),
        ("nufilt_state/model.safetensors", Path.unlink, "lacks nufilt_state/model.safetensors"),
        ("nufilt.json", Path.unlink, "it has no nufilt.json that lists its files"),
        (
            "nufilt.json",
            lambda file: file.write_text("{}"),
            "it has no nufilt.json that lists its files",
        ),
        ("nufilt.json", lambda file: file.write_text("garbage"), "nufilt.json' is damaged"),
        (
            "nufilt.json",
            lambda file: change_json(file, files={}),
            "nufilt.json' is not what was saved",
        ),
        ("nufilt.json", list_more, "lacks ../base/config.json"),
    ],
)
def test_what_is_not_a_whole_result_is_refused_before_a_repository_is_made(
    hub, out, name, damage, message
):
    damage(out / name)
    code, text = nufilt("push", out, "someone/merged")
    assert (code, message in text, "Traceback" in text) == (1, True, False), text
    assert (hub.created, hub.files) == (None, {})


@pytest.mark.parametrize("token", [None, "", " ", "töken", "ключ", "hf_\x1b[31m"])
def test_without_a_token_that_can_be_sent_one_is_told_to_log_in(hub, out, token, monkeypatch):
    monkeypatch.delenv("HF_TOKEN") if token is None else monkeypatch.setenv("HF_TOKEN", token)
    code, text = nufilt("push", out, "someone/merged")
    assert (code, "`hf auth login`" in text, "Traceback" in text) == (1, True, False), text
    assert hub.created is None


@pytest.mark.parametrize(
    ("token", "repo"), [("hf_other", "someone/merged"), ("hf_token", "some one/merged")]
)
def test_what_the_hub_refuses_is_one_line(hub, out, monkeypatch, token, repo):
    monkeypatch.setenv("HF_TOKEN", token)
    code, text = nufilt("push", out, repo)
    assert (code, "error: " in text, "Traceback" in text) == (1, True, False), text
    assert not hub.files


@pytest.mark.parametrize("answer", [{}, [], "yes", None])
def test_what_no_hub_would_answer_is_one_line(hub, out, monkeypatch, answer):
    send = Hub._answer
    monkeypatch.setattr(
        Hub, "_answer", lambda self, content, status=200: send(self, answer, status)
    )
    code, text = nufilt("push", out, "someone/merged")
    assert (code, "does not answer like a hub" in text, "Traceback" in text) == (1, True, False), (
        text
    )
