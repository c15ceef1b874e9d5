"""Tiny models of the families that users merge, and fine-tuned versions of them."""

from copy import deepcopy

import torch
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

SMALL_TRANSFORMER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def vision_config():
    return CLIPVisionConfig(**SMALL_TRANSFORMER, image_size=16, patch_size=8)


def clip(seed=0):
    torch.manual_seed(seed)
    return CLIPVisionModel(vision_config()).eval()


def full_clip(seed=0):
    """Vision and text tower."""
    torch.manual_seed(seed)
    text = CLIPTextConfig(**SMALL_TRANSFORMER, vocab_size=50, eos_token_id=2)
    return CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision_config().to_dict())).eval()


def t5(seed=0):
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=50,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )
    return T5ForConditionalGeneration(config).eval()


def llama(seed=0, tie_word_embeddings=True):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=tie_word_embeddings,
    )
    return LlamaForCausalLM(config).eval()


def llava(seed=0):
    torch.manual_seed(seed)
    text = LlamaConfig(**SMALL_TRANSFORMER, vocab_size=50)
    config = LlavaConfig(vision_config=vision_config(), text_config=text, image_token_index=49)
    return LlavaForConditionalGeneration(config).eval()


class Shared(nn.Module):
    """Two linear layers that share one weight, and an embedding tied to a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.first, self.second, self.head = (nn.Linear(6, n, bias=False) for n in (6, 6, 10))
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
