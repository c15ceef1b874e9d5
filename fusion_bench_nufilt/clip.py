"""Imported for what it does: FusionBench up to 0.2.33 then works with transformers 5."""

from transformers.models.clip import modeling_clip

# FusionBench imports this class, which transformers 5 has made one with CLIPVisionModel.
vars(modeling_clip).setdefault("CLIPVisionTransformer", modeling_clip.CLIPVisionModel)
