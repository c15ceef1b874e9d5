"""The model card: what the hub reads, what a person copies, and what is said of what is left
out.
"""

import io
import re

import pytest
import torch
from huggingface_hub.repocard import metadata_load
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests.cli.helpers import nufilt
from tests.merge.helpers import change, hashes, manifest, merge, save_stream, tensors
from tests.tiny_models import llama


def block(folder, language):
    return re.search(rf"```{language}\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]


@pytest.mark.parametrize("merged", [None, "merged"])
def test_its_recipe_makes_the_result_again(stream, monkeypatch, merged):
    options = {"null_rank": 0.25, "target_modules": ["q_proj", "up_proj"], "settings": {"seed": 7}}
    if merged:
        merge(stream, ["task1"], merged, **options)
    made = merge(stream, ["task2", "task3"], "made", merged=merged, **options)
    (stream / "recipe.yaml").write_text(block(made, "yaml"))
    monkeypatch.chdir(stream)
    code, text = nufilt("merge", "recipe.yaml")
    assert code == 0, text
    assert hashes(stream / "OUT") == hashes(made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_lines_load_the_model_as_it_was_written(tmp_path, dtype):
    save_stream(tmp_path, llama(), dtype=dtype)
    words = Tokenizer(WordLevel({"one": 0, "two": 1}, unk_token="one"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "base")
    out = merge(tmp_path)
    loaded = {}
    exec(block(out, "python").replace("THIS_FOLDER", str(out)), loaded)
    assert type(loaded["model"]) is type(llama())
    assert loaded["tokenizer"].get_vocab() == {"one": 0, "two": 1}
    state = loaded["model"].state_dict()
    for key, value in tensors(out).items():
        assert torch.equal(state[key], value)
        assert value.dtype == dtype


def test_it_has_the_licence_and_the_task_of_the_base_and_no_name_of_a_folder(stream):
    (stream / "base" / "README.md").write_text(
        "---\nlicense: mit\npipeline_tag: text-generation\ntags: [x]\n---\n"
    )
    metadata = metadata_load(merge(stream) / "README.md")
    assert metadata == {
        "license": "mit",
        "pipeline_tag": "text-generation",
        "library_name": "transformers",
        "tags": ["merge", "model-merging", "nufilt"],
    }


@pytest.mark.parametrize(
    "content", [b"\xff", b"---\n[\n---\n", b"---\n- a\n---\n", b"---\nlicense: [a]\n---\n"]
)
def test_a_damaged_card_of_the_base_is_passed_over(stream, content):
    (stream / "base" / "README.md").write_bytes(content)
    assert "license" not in metadata_load(merge(stream) / "README.md")


def test_it_says_in_words_what_was_merged_and_what_was_left_out(stream):
    change(stream / "task1", "model.norm.weight", lambda weight: None)
    out = merge(stream, target_modules=["q_proj"], other_params="mean")
    card = (out / "README.md").read_text()
    assert "Merged: 2 layers in 2 parameters, " in card
    assert "model.layers.*.mlp.up_proj.weight (2)" in card
    assert "'task1' is left out of the mean of 'model.norm.weight'" in card
    for text in manifest(out)["warnings"]:
        assert f"- {text}" in card


@pytest.mark.oldest
def test_the_card_is_in_utf_8_whatever_the_locale(stream, monkeypatch):
    card = "---\nlicense_name: modèle\n---\n"
    (stream / "base" / "README.md").write_text(card, encoding="utf-8")
    monkeypatch.setattr(io, "text_encoding", lambda encoding, *_: encoding or "ascii")
    out = merge(stream, ["task1"])
    assert "license_name: modèle" in (out / "README.md").read_text(encoding="utf-8")


def test_html_in_the_name_of_a_folder_is_text(stream):
    (stream / "task1").rename(stream / "<b onclick=x>")
    card = (merge(stream, ["<b onclick=x>"]) / "README.md").read_text()
    text, *code = card.split("```")
    assert "1. &lt;b onclick=x&gt;\n" in text
    assert "<b" not in text
    assert any("<b onclick=x>" in block for block in code)
