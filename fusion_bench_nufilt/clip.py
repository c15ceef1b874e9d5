"""Imported for what it does: FusionBench up to 0.2.33 then works with transformers 5."""

from transformers.models.clip import modeling_clip

if not hasattr(modeling_clip, "CLIPVisionTransformer"):  # a class that FusionBench imports, and that became this one
    modeling_clip.CLIPVisionTransformer = modeling_clip.CLIPVisionModel
