"""The blocks of code on the pages, and a folder with the models that they name."""

import ast
import json
import re
import shlex
import sys
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.classifiers import train
from tests.conftest import REPO
from tests.tiny_models import adapt_at_random, clip, finetuned, llama

PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
#: A block with the line before it, which may be a comment that marks it.
_BLOCK = re.compile(
    r"(?P<before>[^\n]*)\n(?P<fence>```)(?P<language>\w*)\n(?P<text>.*?)\n```\n", re.DOTALL
)
_MARK = re.compile(r"<!-- (not run|hub): (.*) -->")


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str
    mark: str  # "", "not run" or "hub"
    reason: str

    def commands(self):
        """Return what a shell runs: in a console block, the lines after a `$`."""
        if self.language != "console":
            return self.text
        lines = [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]
        return "\n".join(lines)

    def command_lines(self):
        """Return the words of each command."""
        lines = self.commands().replace("\\\n", " ").splitlines()
        command_lines = [shlex.split(line, comments=True) for line in lines]
        return [words for words in command_lines if words]

    def words(self, program):
        """Return the words of each command of a program, without its name."""
        return [words[1:] for words in self.command_lines() if words[0] == program]


def blocks_of(page):
    """Return the blocks of a page, in its order."""
    blocks = []
    for match in _BLOCK.finditer(page.read_text()):
        kind = ""
        reason = ""
        mark = _MARK.fullmatch(match["before"])
        if mark:
            kind, reason = mark.groups()
        blocks.append(Block(page.name, match["language"], match["text"], kind, reason))
    return blocks


def run_program(anchor, *arguments):
    """Run the program under a heading of the page on troubleshooting, as a message says."""
    page = REPO / "docs" / "troubleshooting.md"
    heading = f"### {anchor.replace('-', ' ').capitalize()}\n"
    text = page.read_text().partition(heading)[2].partition("```python\n")[2].partition("```")[0]
    with mock.patch.object(sys, "argv", [anchor, *map(str, arguments)]):
        exec(text, {})


def follow_renaming(message):
    """Do what a message says about names of tensors that are to be shorter."""
    anchor, folder, expression = re.search(
        r"docs/troubleshooting\.md#([\w-]+) .* given '(.*)' and ('.*')$", message
    ).groups()
    run_program(anchor, folder, ast.literal_eval(expression))


def write_files(folder, page):
    """Write the files that a page shows: YAML whose first line is their name."""
    for block in blocks_of(page):
        if block.language == "yaml" and block.text.startswith("# "):
            name, _, content = block.text.removeprefix("# ").partition("\n")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)


def save_clips_and_images(folder, demo):
    """A CLIP and vision towers of it in `models`, and images of each in `images`."""
    models = folder / "models"
    models.mkdir()
    rng = np.random.default_rng(0)
    of_demo = {"clip": "clip", "birds": "digits", "cars": "shapes", "planes": "letters"}
    for name, demo_name in of_demo.items():
        (models / name).symlink_to(demo / demo_name)
    for task in ("birds", "cars", "planes"):
        for label in ("red", "blue"):
            images = folder / "images" / task / label
            images.mkdir(parents=True)
            for count in range(5):
                pixels = rng.integers(256, size=(32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(images / f"{count}.png")


def save_models(folder):
    """Llamas `base`, `math`, `code` and `chat`; adapters `sql`, `latin` and `poems`; classifiers
    `birds`, `cars` and `insects` of `vit`; and sentences for a task of lm-eval.
    """
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(50)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1")
    base = llama()
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    for seed, name in enumerate(("math", "code", "chat"), start=1):
        finetuned(base, seed, scale=0.002).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for seed, name in enumerate(("sql", "latin", "poems"), start=1):
        save_adapter(folder / name, folder / "base", seed)
    (folder / "llama-7b").symlink_to("base")
    (folder / "llama-7b-math").symlink_to("math")
    vit, classifiers = train("vit")
    vit.save_pretrained(folder / "vit")
    for name, classifier in zip(("birds", "cars", "insects"), classifiers.values(), strict=True):
        classifier.save_pretrained(folder / name)
    lines = [json.dumps({"text": f"w{i}", "label": i % 2}) for i in range(4)]
    (folder / "tasks").mkdir()
    (folder / "tasks" / "yes_no.json").write_text("\n".join(lines))


def save_adapter(folder, base, seed):
    """A random LoRA adapter of a Llama."""
    model = LlamaForCausalLM.from_pretrained(base)
    adapter = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    adapt_at_random(adapter, seed)
    adapter.save_pretrained(folder)


def names():
    """What blocks of Python take as given."""
    base = clip()
    models = {"base": base, "birds": finetuned(base, 1), "cars": finetuned(base, 2)}
    matrices = {
        "pretrained": {"layer": torch.zeros(6, 6)},
        "merged": {"layer": torch.eye(6)},
        "task": {"layer": torch.ones(6, 6)},
    }
    return {**models, **matrices, "accuracy": lambda model: 1.0}
