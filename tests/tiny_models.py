"""Tiny models of the families that users merge, and fine-tuned versions of them."""

from copy import deepcopy

import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
T5 = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
VISION = hf.CLIPVisionConfig(**SMALL, image_size=16, patch_size=8)


def build(kind, config, seed):
    torch.manual_seed(seed)
    return kind(config).eval()


def clip(seed=0):
    return build(hf.CLIPVisionModel, deepcopy(VISION), seed)


def tower(model):
    """The vision tower in a CLIPVisionModel: itself since transformers 5."""
    return getattr(model, "vision_model", model)


#: What the keys of a CLIPVisionModel begin with.
TOWER = ""
if hasattr(clip(), "vision_model"):
    TOWER = "vision_model."


def full_clip(seed=0):
    """Vision and text tower."""
    tokens = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    text = hf.CLIPTextConfig(**SMALL, vocab_size=50, **tokens)
    return build(
        hf.CLIPModel,
        hf.CLIPConfig(text_config=text.to_dict(), vision_config=VISION.to_dict()),
        seed,
    )


def t5(seed=0):
    config = hf.T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    return build(hf.T5ForConditionalGeneration, config, seed)


def llama(seed=0, tie_word_embeddings=True):
    size = {**SMALL, "num_attention_heads": 4, "vocab_size": 50}
    return build(
        hf.LlamaForCausalLM, hf.LlamaConfig(**size, tie_word_embeddings=tie_word_embeddings), seed
    )


def llava(seed=0):
    text = hf.LlamaConfig(**SMALL, vocab_size=50)
    config = hf.LlavaConfig(vision_config=deepcopy(VISION), text_config=text, image_token_index=49)
    return build(hf.LlavaForConditionalGeneration, config, seed)


class Shared(nn.Module):
    """Two linear layers that share one weight, and an embedding tied to a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 10, bias=False)
        self.second.weight = self.first.weight
        self.head.weight = self.embedding.weight


@torch.no_grad()
def finetuned(model, seed, scale=0.02):
    """A copy with a random step on every parameter."""
    copy = deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in copy.parameters():
        parameter += scale * torch.randn(parameter.shape, generator=generator)
    return copy


@torch.no_grad()
def adapt_at_random(model, seed, scale=0.02):
    """Take a random step on every parameter that is trained, in place."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += scale * torch.randn(parameter.shape, generator=generator)


def damaged_clip(folder):
    """Save a CLIP tower whose checkpoint lacks a weight; return the entry of a model pool, and the
    weight's key.
    """
    model = clip(2)
    key = next(
        name for name, value in model.named_parameters() if "mlp" in name and value.ndim == 2
    )
    model.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    weights = {name: value for name, value in load_file(file).items() if not name.endswith(key)}
    save_file(weights, file, metadata={"format": "pt"})
    load = "transformers.CLIPVisionModel.from_pretrained"
    return {"_target_": load, "pretrained_model_name_or_path": str(folder)}, key
