"""Bad inputs of `nufilt merge` as a table: what is done to good inputs, and what the command must
say.

A row is a name, a mutation of a folder with good inputs (``base``, ``task1``, ``task2``, the
adapter ``lora``, and ``one``, which is base and task1 merged), what the line of error must say, and
the command's arguments. If it must say nothing, the input only looks bad, and the merge must be
that of the good inputs. ``~`` stands before a warning.
"""

import inspect
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from fusion_bench_nufilt.cli.merge import merge
from fusion_bench_nufilt.cli.merging import MODELS
from tests.adversary import mutations as do
from tests.adversary.mutations import (
    EMBEDDING,
    INDEX,
    NORM,
    UP,
    Mutation,
    change,
    in_json,
    link,
    nothing,
    write,
)

STREAM = ("--task", "task1", "--task", "task2")
LORA = ("--task", "task1", "--task", "lora")
MORE = ("--merged", "one", "--task", "task2")
ANYWAY = (*MORE, "--no-verify")  # or else what was changed is refused by its digest


class Row(NamedTuple):
    name: str
    mutation: Mutation
    says: str | None  # a regular expression; None: merged as if nothing were wrong
    arguments: tuple[str, ...] = STREAM


LORA_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
LORA_B = LORA_A.replace("lora_A", "lora_B")


def rows() -> list[Row]:
    """Return the whole table."""
    groups = (
        json_texts,
        json_fields,
        option_values,
        weight_files,
        weights,
        other_tensors,
        adapters,
        options,
        places,
    )
    return [row for group in groups for row in group()]


# --- JSON ---

TEXTS = {
    "empty": b"",
    "half": b'{"a": [1,',
    "no UTF-8": b'\xff\xfe{"a"',
    "a list": b"[1, 2]",
    "null": b"null",
    "a number": b"3",
    "a word": b'"yes"',
    "too deep": b'{"a":' * 100_000,
    "a number too long": b'{"a": ' + b"9" * 5000 + b"}",
}
JSON_FILES = {
    INDEX: STREAM,
    "base/config.json": STREAM,
    "lora/adapter_config.json": LORA,
    "one/nufilt.json": ANYWAY,
}


def json_texts() -> Iterator[Row]:
    for file, arguments in JSON_FILES.items():
        for name, text in TEXTS.items():
            says = rf"{re.escape(file)}' is damaged"
            yield Row(
                f"{file} is {name}",
                lambda folder, f=file, t=text: (folder / f).write_bytes(t),
                says,
                arguments,
            )


VALUES = [None, True, 3, -1, 0, 1.5, float("nan"), "text", [], [None], {}, {"a": 1}, 10**30]
# For each field, the values among these that are of its kind: they are refused by another check, or
# not at all.
FIELDS: dict[tuple[str, str], list[object]] = {
    (INDEX, "weight_map"): [{}],
    ("base/config.json", "architectures"): [None, []],
    ("lora/adapter_config.json", "r"): [3, 10**30],
    ("lora/adapter_config.json", "lora_alpha"): [3, -1, 0, 1.5, 10**30],
    ("lora/adapter_config.json", "rank_pattern"): [None, {}, {"a": 1}],
    ("lora/adapter_config.json", "alpha_pattern"): [None, {}, {"a": 1}],
    ("lora/adapter_config.json", "peft_type"): [None, "text"],
    ("one/nufilt.json", "step"): [3],
    ("one/nufilt.json", "tasks"): [[]],
    ("one/nufilt.json", "settings"): [{}, {"a": 1}],
}


def json_fields() -> Iterator[Row]:
    for (file, field), fine in FIELDS.items():
        for value in VALUES:
            if any(value is good or (value == good and type(value) is type(good)) for good in fine):
                continue
            says = rf"{re.escape(file)}' is damaged, field '{field}"
            yield Row(
                f"{file}: {field} is {value}",
                in_json(file, **{field: value}),
                says,
                JSON_FILES[file],
            )
    config = partial(in_json, "base/config.json")
    no_type = "is of model_type 'llama'.*'text'"
    yield Row("config: model_type is a text", config(model_type="text"), no_type)
    for field in ("hidden_size", "vocab_size", "num_attention_heads"):
        yield Row(f"config: {field} is a text", config(**{field: "text"}), None)
    more = r"stores 9 tensors of layers .*, 'model\.layers\.1\."
    yield Row("fewer layers than stored", config(num_hidden_layers=1), more)
    yield Row("more layers than stored", config(num_hidden_layers=3), "lacks the weight of 7")
    no_step = in_json("one/nufilt.json", step=...)
    unknown_step = "no nufilt.json that tells how many tasks it holds: say with --step"
    yield Row("no step", no_step, unknown_step, MORE)
    yield Row("no step but --step", no_step, None, (*ANYWAY, "--step", "2"))
    of_seed = "~seed is 42 there and 7 here"
    yield Row("other settings than before", nothing, of_seed, (*MORE, "--seed", "7"))
    yield Row("an index of nothing", in_json(INDEX, weight_map={}), r"index\.json' names no tensor")
    says = r"index\.json' names .*: no safetensors files of this"
    elsewhere = ("../task1/model.safetensors", "/etc/passwd")
    for name in ("README.md", "nufilt.json", *elsewhere, "", ".", "a\0b"):
        yield Row(f"a shard called {name!r}", do.in_index(name), says)
    not_there = "names shards that are not there: 'no.safe"
    yield Row("a shard that is not there", do.in_index("no.safetensors"), not_there)
    lacking = "names tensors that its files lack: 'model.more.weight'"
    yield Row("a tensor that no file has", do.in_index(None, "model.more.weight"), lacking)


def option_values() -> Iterator[Row]:
    """Values of the wrong kind for every option."""
    for name in inspect.signature(merge).parameters:
        if name not in (*MODELS, "context", "words", "dry_run"):
            for value in ("{a:1}", "[3]"):
                words = (*STREAM, f"{name}={value}")
                yield Row(f"options {name}={value}", nothing, rf"\b{name}\b", words)


# --- files ---


def weight_files() -> Iterator[Row]:
    says = "is truncated or corrupt"
    for model, file in (("base", do.shard), ("task2", do.single)):
        for size in (0, 1, 7, 8, 100, -1000, -1):

            def cut(folder, model=model, file=file, size=size):
                path = file(folder / model)
                os.truncate(path, size % path.stat().st_size)

            yield Row(f"{model} is cut to {size} bytes", cut, says)
        for name, head in {
            "a header of an exabyte": (2**60).to_bytes(8, "little"),
            "a header of -1": b"\xff" * 8,
            "no header": bytes(8),
            "a pickle": b"\x80\x04\x95cos\nsystem\n",
            "a zip": b"PK\x03\x04",
            "other letters": b"\x08\x00\x00\x00\x00\x00\x00\x00[[[[[[[[",
        }.items():
            yield Row(
                f"{model} begins with {name}",
                lambda d, m=model, f=file, h=head: do.overwrite(f(d / m), h),
                says,
            )
        kinds: dict[str, tuple[str, Callable[[Path], object]]] = {
            "a folder": ("no regular file", os.mkdir),
            "a pipe": ("no regular file", os.mkfifo),
            "a dead link": ("No such file", lambda path: path.symlink_to("nowhere")),
            "gone": ("no safetensors file", lambda path: None),
        }
        for kind, (why, make) in kinds.items():
            instead = lambda d, m=model, f=file, make=make: do.instead(f(d / m), make)  # noqa: E731
            yield Row(f"{model} is {kind}", instead, f"{why}|not there")
    pickled = lambda d: do.single(d / "task2").rename(d / "task2" / "x.bin")  # noqa: E731
    yield Row("pickled weights", pickled, "are refused")
    without_index = lambda d: (d / INDEX).unlink()  # noqa: E731
    yield Row("two files and no index", without_index, r"no model\.safetensors\.index\.json")
    yield Row("a tensor in two shards", do.twice, "in another file: remove one of them")
    for name in ("tokenizer.json", "additional_chat_templates/x.jinja"):
        elsewhere = lambda d, n=name: link(d / "base" / n, "/etc/hostname")  # noqa: E731
        yield Row(f"{name} is a link to elsewhere", elsewhere, "is a link to")
        within = lambda d, n=name: link(d / "base" / n, d / "base" / "config.json")  # noqa: E731
        yield Row(f"{name} is a link within", within, None)
    for name in ("sub", "additional_chat_templates/sub"):
        yield Row(f"a folder {name}", lambda d, n=name: (d / "base" / n).mkdir(parents=True), None)
    yield Row("a pipe among small files", lambda d: os.mkfifo(d / "base" / "vocab.txt"), None)
    beside = lambda d: (d / "base" / "modeling_x.py").write_text("raise SystemExit")  # noqa: E731
    yield Row("code beside the weights", beside, None)
    own = {
        "auto_map": {"AutoConfig": "modeling_x.C", "AutoModelForCausalLM": "modeling_x.M"},
        "model_type": "x",
    }

    def code(folder):
        in_json("base/config.json", **own)(folder)
        for task in ("task1", "task2"):
            in_json(f"{task}/config.json", model_type="x")(folder)
        (folder / "base/modeling_x.py").write_text("raise SystemExit")

    yield Row("code that the config names", code, None)


def weights() -> Iterator[Row]:
    for model, arguments in {"base": STREAM, "task2": STREAM, "one": ANYWAY}.items():
        for value in ("nan", "inf", "-inf"):
            fill = lambda w, v=value: w.index_fill(0, torch.tensor([3]), float(v))  # noqa: E731
            says = rf"{model}', tensor '{UP}' has NaN or infinite values"
            yield Row(f"{value} in {model}", change(model, UP, fill), says, arguments)
        for dtype in (torch.int8, torch.float8_e4m3fn, torch.bool, torch.int64, torch.uint8):
            to = change(model, UP, lambda w, d=dtype: w.to(d))
            says = rf"{model}', tensor '{UP}' is stored as .* can't be merged"
            yield Row(f"{dtype} in {model}", to, says, arguments)
        shapes: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
            "transposed": lambda w: w.T.contiguous(),
            "flat": lambda w: w.flatten(),
            "in three dimensions": lambda w: w[None],
            "a number": lambda w: w[0, 0],
            "empty": lambda w: w[:0],
            "a row short": lambda w: w[:-1].contiguous(),
            "gone": lambda w: None,
        }
        for name, shape in shapes.items():
            says = {
                "base": "base'|the base",
                "task2": rf"task2' lacks '{UP}'|task2' has 1 empty tensors: '{UP}'|"
                rf"'{UP}': shape .* differs from \(64, 32\) of the base",
                "one": "one' has 1 empty tensors|files lack"
                if name == "empty"
                else "not made from this base|files lack",
            }[model]
            yield Row(f"a layer of {model} is {name}", change(model, UP, shape), says, arguments)
        control = do.rename(model, UP, "model.layers.1.mlp.up\x1b[31m_proj.weight")
        name = f"a control character in a name of {model}"
        yield Row(name, control, "lack|was not made", arguments)

    lost = do.half(change("task2", UP, lambda w: w.float() + 1e6))
    too_large = r"up_proj\.weight' has values that torch\.float16 can't hold"
    yield Row("a result that float16 can't hold", lost, too_large)


def other_tensors() -> Iterator[Row]:
    """Tensors outside the merged layers."""
    mean = (*STREAM, "--other-params", "mean")
    longer = change("task2", EMBEDDING, lambda w: torch.cat([w, w[:2]]))
    by_numbers = "~rows of 'task2' and the base are matched by their numbers"
    yield Row("more rows of the embedding", longer, by_numbers)
    wider = change("task2", EMBEDDING, lambda w: torch.cat([w, w[:, :2]], 1))
    says = rf"'{EMBEDDING}': shape \(50, 34\) differs from \(50, 32\) of the base"
    yield Row("a wider embedding", wider, says)
    float8 = change("task2", EMBEDDING, lambda w: w.to(torch.float8_e4m3fn))
    says = f"task2', tensor '{EMBEDDING}' is stored as F8_E4M3"
    yield Row("quantised and averaged", float8, says, mean)
    yield Row("quantised and not used", float8, None)
    shorter = change("one", EMBEDDING, lambda w: w[:-1].contiguous())
    says = f"one', tensor '.*{EMBEDDING}': .*not made from this base"
    yield Row("merged from another base", shorter, says, MORE)
    fill = lambda w: w.fill_(float("nan"))  # noqa: E731
    says = f"~tensor '{NORM}' has NaN or infinite values in the base"
    yield Row("a norm of NaN in base", change("base", NORM, fill), says)
    says = f"task2', tensor '{NORM}' has NaN or infinite values"
    yield Row("a norm of NaN in task2", change("task2", NORM, fill), says, mean)
    lost = do.half(change("task2", EMBEDDING, lambda w: w.float() + 1e6))
    says = r"has values that torch\.float16 can't hold"
    yield Row("a mean that float16 can't hold", lost, says, mean)
    says = r"~task2' looks as if .* another base.*cosine -?0\.0"
    yield Row("a task of another base", do.another_base, says)


# --- adapters ---


def adapters() -> Iterator[Row]:
    def said(name: str, says: str, **fields: object) -> Row:
        return Row(f"adapter: {name}", in_json("lora/adapter_config.json", **fields), says, LORA)

    apart = "they do not belong together"
    yield said("r that is not that of the tensors", apart, r=5)
    yield said("no r pattern for its tensors", apart, rank_pattern={"q_proj": 3})
    for field in ("alpha_pattern", "rank_pattern"):
        says = f"adapter 'lora' has a {field} in its adapter_config.json .*unterminated"
        yield said(f"{field} that is no expression", says, **{field: {"q_proj(": 4}})
    yield said("lora_bias", "merge it into its base with peft", lora_bias=True)
    yield said("use_dora", apart, use_dora=True)
    lacking = "has no rows of the tokens that its trainable_token_indices name: save it again"
    yield said("trainable_token_indices", lacking, trainable_token_indices=[0, 1])
    other_kind = "only LoRA, rsLoRA and DoRA are merged"
    yield said("layer_replication", other_kind, layer_replication=[[0, 1]])
    no_names = {"target_parameters": [[0, 1]]}
    yield said("target_parameters that are no names", "target_parameters", **no_names)
    for kind in ("corda", "loftq", "lora_ga"):
        yield said(f"initialised by {kind}", "changes the base as well", init_lora_weights=kind)
    for key in (LORA_A, LORA_B):
        part = key.split(".")[-2]
        for name, edit, says in (
            ("is gone", lambda w: None, apart),
            ("is flat", lambda w: w.flatten(), apart),
            ("is wider", do.wider, "belong together|another base|shape"),
            ("is int8", lambda w: w.to(torch.int8), "is stored as I8"),
            ("has NaN", lambda w: w.fill_(float("nan")), "has NaN or infinite values"),
        ):
            yield Row(f"adapter: {part} {name}", change("lora", key, edit), says, LORA)
    yield Row("an adapter as base", lambda d: do.swap(d / "base", d / "lora"), "is an adapter")
    swapped = lambda d: do.swap(d / "one", d / "lora")  # noqa: E731
    yield Row("an adapter as merged model", swapped, "is an adapter", MORE)


# --- options and places ---


def options() -> Iterator[Row]:
    for words, says in {
        "--lora-rank 1000000000": "lora_rank must be a whole number >= 0 and <= 65536",
        "--step 0": "step must be a whole number >= 1",
        "--step 5": "step 5 needs the merged model",
        f"--step 1{'0' * 30}": "step must be a whole number >= 1 and <= 1000000",
        "--max-memory lots": "max_memory must be a size",
        f"--max-memory {'9' * 400}": "max_memory must be",
        "--max-memory 0": "max_memory must be a whole number >= 1",
        "--max-memory 1KB": "is below the",
        "--device toaster": "device 'toaster'",
        "--target-modules q_proj)(": r"target_modules: 'q_proj\)\(' is no regular expression",
        "--target-modules (": "is no regular expression",
        "--target-modules *": "is no regular expression",
        "--exclude-modules (": "exclude_modules: '\\(' is no regular expression",
        "--target-modules typo": "names no layer",
        "--exclude-modules .*": "leave no layer",
        "--null-space maybe": "'true'.*'zero'",
        "--other-params maybe": "'pretrained'.*'mean'",
        "state=maybe": "state must be true or false, got 'maybe'",
        "no_such_key=3": "there is no option 'no_such_key'",
        "no_such_recipe.yaml": "there is no recipe file",
    }.items():
        yield Row(f"options {words[:40]}", nothing, says, (*STREAM, *words.split()))
    spellings = ("--task", "task1", "--task", "./base/../task1")
    yield Row("the same task by two spellings", nothing, "is also task .*: name it once", spellings)
    not_there = ("--task", "no/such/task")
    yield Row("a task that is not there", nothing, "no folder 'no/such/task'", not_there)
    no_name = ("--task", "no such task")
    says = "is neither a folder nor the name of a"
    yield Row("a task that is no name", nothing, says, no_name)
    says = r"is not F32 \(64, 32\)"
    with_state = (*ANYWAY, "--state")
    yield Row("int8 float32 layers", do.state_of(torch.int8), says, with_state)
    yield Row("short float32 layers", do.state_of(None), says, with_state)


def places() -> Iterator[Row]:
    work = ".out.nufilt"
    dry = (*STREAM, "--dry-run")
    exists = "exists: remove it"
    yield Row("OUT is a file", lambda d: (d / "out").write_text("precious"), exists)
    yield Row("OUT is a file in a dry run", lambda d: (d / "out").touch(), "exists: rem", dry)
    yield Row("OUT is a folder", lambda d: (d / "out").mkdir(), exists)
    yield Row("OUT is a dead link", lambda d: (d / "out").symlink_to("nowhere"), exists)
    to_nowhere = lambda d: (d / work).symlink_to("nowhere")  # noqa: E731
    yield Row("the work folder is a dead link", to_nowhere, "is a file or a link")
    yield Row("the work folder is a file", lambda d: write(d / work), "is a file or a link")
    to_task = lambda d: link(d / work / "model", d / "task1")  # noqa: E731
    yield Row("a link in a foreign work folder", to_task, "was not made by nufilt: move it away")
    move = lambda d: shutil.copytree(d / "task1", d / work)  # noqa: E731
    yield Row("a task in the work folder", move, "is inside", ("--task", work))
    inside = lambda d: shutil.copytree(d / "one", d / work / "model")  # noqa: E731
    merged = ("--merged", f"{work}/model", *MORE[2:])
    yield Row("the merged model in the work folder", inside, "is inside", merged)

    def linked(folder: Path) -> None:
        write(folder / work / "model" / "nothing")
        do.single(folder / "task1").rename(folder / work / "model" / "model.safetensors")
        do.single(folder / "task1").symlink_to(folder / work / "model" / "model.safetensors")

    says = r"task1' is inside '.*\.out\.nufilt'"
    yield Row("weights that are links into the work folder", linked, says)
    for name, mutation, says, out in (
        ("OUT in an input", nothing, "which is not written to", "task1/out"),
        ("OUT in a file", lambda d: write(d / "file"), "is no folder that can be", "file/out"),
        ("OUT is where we are", nothing, "is inside|exists", "."),
        ("OUT is the root", nothing, "is inside|exists", "/"),
        ("OUT in /proc", nothing, "MB left", "/proc/out"),
        ("OUT with a long name", nothing, "too long", "o" * 300),
    ):
        yield Row(name, mutation, says, (*STREAM, "--out", out))
