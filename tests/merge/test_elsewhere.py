"""A merged model loads elsewhere: its files are those of a plain model, which vLLM, SGLang and
llama.cpp read.
"""

import json
from copy import deepcopy

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.merge.helpers import SHARDED, merge, tensors
from tests.models.test_quantised import quantise
from tests.models.test_vocabulary import tokenizer
from tests.tiny_models import finetuned, llama

INDEX = "model.safetensors.index.json"
OURS = {"nufilt.json", "nufilt_state", "README.md"}
NEW = ("<fim>", "indent", "<eot>")


def save(folder, model, tokenizer, **options):
    model.save_pretrained(folder, **options)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module", params=["sharded", "tied", "FP8", "grown"])
def merged(request, tmp_path_factory):
    """A folder with a merged model, `out`, its base, and `plain`, the base as a model of the
    result's form.
    """
    kind = request.param
    folder = tmp_path_factory.mktemp("merged")
    base = llama(tie_word_embeddings=kind == "tied").bfloat16()
    base_tokenizer = tokenizer()
    plain = base
    plain_tokenizer = base_tokenizer
    if kind == "grown":
        plain = deepcopy(base)
        plain_tokenizer = tokenizer(*NEW)
        plain.resize_token_embeddings(len(plain_tokenizer), mean_resizing=False)
    shards = SHARDED
    if kind == "tied":
        shards = "1GB"
    save(folder / "base", base, base_tokenizer, max_shard_size=shards)
    save(folder / "plain", plain, plain_tokenizer)
    save(folder / "task1", finetuned(base, seed=1), base_tokenizer)
    save(folder / "task2", finetuned(plain, seed=2), plain_tokenizer)
    if kind == "FP8":
        quantise(folder / "base")
    merge(folder, ["task1", "task2"], method="best")
    return folder


def read(path):
    return json.loads(path.read_text())


def headers(folder):
    """Dtype and shape of every tensor in the folder's files; and the name of the file with it."""
    forms = {}
    files = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for key in file.keys():  # noqa: SIM118
                assert key not in forms
                part = file.get_slice(key)
                forms[key] = (part.get_dtype(), part.get_shape())
                files[key] = path.name
    return forms, files


def test_names_dtypes_and_shapes_are_those_of_the_plain_model(merged):
    forms, _ = headers(merged / "out")
    plain_forms, _ = headers(merged / "plain")
    assert forms == plain_forms


def test_every_tensor_is_in_the_bases_file_and_the_index_says_so(merged):
    _, files = headers(merged / "out")
    _, base_files = headers(merged / "base")
    assert files == {key: file for key, file in base_files.items() if key in files}
    is_sharded = len(set(files.values())) > 1
    assert (merged / "out" / INDEX).exists() == is_sharded
    if is_sharded:
        assert read(merged / "out" / INDEX)["weight_map"] == files


def test_config_and_tokenizer_are_those_of_the_plain_model(merged):
    out = merged / "out"
    plain = merged / "plain"
    assert read(out / "config.json") == read(plain / "config.json")
    for path in plain.glob("*token*.json"):
        assert read(out / path.name) == read(path)
    text = "w2 <fim>w3 indent"
    assert AutoTokenizer.from_pretrained(out)(text) == AutoTokenizer.from_pretrained(plain)(text)
    base_names = {path.name for path in (merged / "base").iterdir()}
    assert {path.name for path in out.iterdir()} - OURS == base_names


@pytest.fixture
def gguf():
    return pytest.importorskip("gguf", reason="needs gguf: pip install '.[dev]'")


def write_gguf(gguf, folder, path):
    """Write a Llama as llama.cpp's converter does: every tensor of the files under llama.cpp's name
    for it.
    """
    config = read(folder / "config.json")
    layers = config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    writer = gguf.GGUFWriter(path, "llama")
    gguf.Metadata.load(None, folder).set_gguf_meta_model(writer)  # of the model card
    writer.add_vocab_size(config["vocab_size"])
    writer.add_block_count(layers)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for key, value in tensors(folder).items():
        if key.endswith(("q_proj.weight", "k_proj.weight")):
            # The halves of a rotated pair side by side.
            value = value.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(value.shape)
        name = names.get_name(key, try_suffixes=(".weight",))
        assert name, f"llama.cpp has no name for {key}"
        kind = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(name, gguf.quantize(value.float().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def test_in_llama_cpps_format_it_has_the_same_logits(merged, gguf):
    write_gguf(gguf, merged / "out", merged / "out.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(merged, gguf_file="out.gguf", dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(merged / "out", dtype=torch.float32)
    ids = torch.arange(ours.config.vocab_size)[None]
    torch.testing.assert_close(theirs(ids).logits, ours(ids).logits)
