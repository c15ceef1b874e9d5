"""Importing this module makes FusionBench up to 0.2.33 work with transformers 5."""

from transformers.models.clip import modeling_clip

# FusionBench imports this class, which transformers 5 has merged into CLIPVisionModel.
vars(modeling_clip).setdefault("CLIPVisionTransformer", modeling_clip.CLIPVisionModel)
