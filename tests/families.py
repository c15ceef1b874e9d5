"""Tiny models of every family that FusionBench has a pool for, and of others that hold their layers
in other ways.
"""

from collections import OrderedDict

import torch
import transformers
from torch import nn

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
WIDE = {**SMALL, "vocab_size": 50}
EXPERTS = {**WIDE, "num_key_value_heads": 2, "num_experts_per_tok": 2, "num_local_experts": 3}
IMAGES = {**SMALL, "image_size": 16, "patch_size": 8}
DEEPSEEK = {
    **WIDE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
}
DEEPSEEK |= {
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "n_routed_experts": 3,
}
DEEPSEEK |= {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
GPT2 = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
RESNET = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 1]}
CONVNEXT = {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 2]}


class OpenClipBlock(nn.Module):
    """As open_clip's ResidualAttentionBlock names its parts."""

    def __init__(self, width):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.ln_2 = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 4, batch_first=True)
        c_fc = nn.Linear(width, 2 * width)
        c_proj = nn.Linear(2 * width, width)
        self.mlp = nn.Sequential(OrderedDict(c_fc=c_fc, gelu=nn.GELU(), c_proj=c_proj))

    def forward(self, x):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class OpenClipVision(nn.Module):
    """The vision tower of an OpenCLIP model, with its names:
    ``visual.transformer.resblocks.0.attn.in_proj_weight``.
    """

    def __init__(self, width=32):
        super().__init__()
        self.visual = nn.Module()
        self.visual.conv1 = nn.Conv2d(3, width, 8, 8, bias=False)
        self.visual.transformer = nn.Module()
        self.visual.transformer.resblocks = nn.Sequential(
            OpenClipBlock(width), OpenClipBlock(width)
        )
        self.visual.proj = nn.Parameter(0.1 * torch.randn(width, 16))

    def forward(self, pixel_values):
        x = self.visual.conv1(pixel_values).flatten(2).transpose(1, 2)
        return self.visual.transformer.resblocks(x).mean(1) @ self.visual.proj


def _build(name, config, **settings):
    model = getattr(transformers, name)(getattr(transformers, config)(**settings)).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # some are left uninitialised, or at zero
            parameter.copy_(0.1 * torch.randn_like(parameter))
    return model


def openclip():
    torch.manual_seed(0)
    return OpenClipVision().eval()


FAMILIES = {
    "gpt2": lambda: _build("GPT2LMHeadModel", "GPT2Config", **GPT2),
    "gpt_neox": lambda: _build("GPTNeoXForCausalLM", "GPTNeoXConfig", **WIDE),
    "phi3": lambda: _build("Phi3ForCausalLM", "Phi3Config", **WIDE, pad_token_id=0),
    "mistral": lambda: _build("MistralForCausalLM", "MistralConfig", **WIDE, num_key_value_heads=2),
    "qwen2": lambda: _build("Qwen2ForCausalLM", "Qwen2Config", **WIDE, num_key_value_heads=2),
    "mixtral": lambda: _build("MixtralForCausalLM", "MixtralConfig", **EXPERTS),
    "gpt_oss": lambda: _build(
        "GptOssForCausalLM", "GptOssConfig", **EXPERTS, head_dim=8, attn_implementation="eager"
    ),
    "granitemoe": lambda: _build("GraniteMoeForCausalLM", "GraniteMoeConfig", **EXPERTS),
    "deepseek_v2": lambda: _build("DeepseekV2ForCausalLM", "DeepseekV2Config", **DEEPSEEK),
    "roberta": lambda: _build(
        "RobertaForSequenceClassification", "RobertaConfig", **WIDE, max_position_embeddings=40
    ),
    "bert": lambda: _build("BertForSequenceClassification", "BertConfig", **WIDE),
    "vit": lambda: _build("ViTForImageClassification", "ViTConfig", **IMAGES),
    "dinov2": lambda: _build("Dinov2ForImageClassification", "Dinov2Config", **IMAGES),
    "resnet": lambda: _build("ResNetForImageClassification", "ResNetConfig", **RESNET),
    "convnext": lambda: _build("ConvNextForImageClassification", "ConvNextConfig", **CONVNEXT),
}


#: Those whose models hold layers in other ways than their checkpoints. A pool merges what the model
#: holds.
CONVERTED = ()
if transformers.__version__ >= "5":
    CONVERTED = ("mixtral", "granitemoe", "deepseek_v2", "vit", "dinov2")


@torch.no_grad()
def output(model):
    """What a model says of a fixed input."""
    generator = torch.Generator().manual_seed(0)
    if getattr(model, "main_input_name", "pixel_values") == "pixel_values":
        size = getattr(getattr(model, "config", None), "image_size", 16)
        result = model(pixel_values=torch.randn(2, 3, size, size, generator=generator))
    else:
        result = model(input_ids=torch.randint(3, 50, (1, 6), generator=generator))
    if isinstance(result, torch.Tensor):
        return result
    return result.logits
