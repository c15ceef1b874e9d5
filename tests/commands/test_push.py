"""`nufilt push`, against a stand-in for the hub with the signatures of the real client."""

from unittest.mock import Mock, create_autospec

import pytest
from huggingface_hub import HfApi, RepoUrl
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from tests.commands.helpers import nufilt


@pytest.fixture
def api(monkeypatch):
    api = create_autospec(HfApi, instance=True)
    api.create_repo.return_value = RepoUrl("https://huggingface.co/someone/merged")
    monkeypatch.setattr("fusion_bench_nufilt.commands.push.HfApi", lambda: api)
    return api


def test_a_result_is_uploaded_whole(api, tmp_path):
    (tmp_path / "nufilt.json").write_text("{}")
    code, text = nufilt("push", tmp_path, "someone/merged", "--private")
    assert (code, text.strip().endswith("/someone/merged")) == (0, True), text
    api.create_repo.assert_called_once_with("someone/merged", private=True, exist_ok=True)
    sent = api.upload_folder.call_args.kwargs
    assert (sent.keys(), sent["repo_id"]) == ({"repo_id", "folder_path", "commit_message"}, "someone/merged")
    assert sent["folder_path"] == tmp_path


def test_only_what_nufilt_merge_made_is_uploaded(api, tmp_path):
    code, text = nufilt("push", tmp_path, "someone/merged")
    assert (code, "it has no nufilt.json" in text) == (1, True)
    assert not api.mock_calls


@pytest.mark.parametrize("error", [HfHubHTTPError("401 Client Error", response=Mock()), HFValidationError("a space")])
def test_what_the_hub_refuses_is_one_line(api, tmp_path, error):
    api.create_repo.side_effect = error
    (tmp_path / "nufilt.json").write_text("{}")
    code, text = nufilt("push", tmp_path, "some one/merged")
    assert (code, "error: " in text, "Traceback" in text) == (1, True, False), text
    assert not api.upload_folder.called
