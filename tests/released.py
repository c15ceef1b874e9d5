"""Tiny models of the families that people fine-tune most: decoders, mixtures of experts,
vision-language, encoders.
"""

import torch
import transformers

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
TEXT |= {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    **TEXT,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
DEEPSEEK = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
}
DEEPSEEK |= {
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "v_head_dim": 8,
}
DEEPSEEK |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LINEAR |= {
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 24,
}
LATENT = {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "num_kv_shared_layers": 0,
}
IMAGES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
IMAGES |= {"image_size": 28, "patch_size": 14}
QWEN_IMAGES = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
}
QWEN_IMAGES |= {"patch_size": 14, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SECTIONS = {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}}
LLAMA4_IMAGES = {
    **IMAGES,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
WHISPER = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "vocab_size": 64,
}
WHISPER |= {
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 8,
}
WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
GEMMA_IMAGES = {**IMAGES, "head_dim": 8, "num_key_value_heads": 4, "position_embedding_size": 16}
PHI_SOUNDS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_blocks": 2,
    "num_attention_heads": 4,
    "input_size": 16,
}
PHI_SOUNDS |= {
    "ext_pw_out_channel": 32,
    "depthwise_separable_out_channel": 32,
    "nemo_conv_channels": 16,
}


def vlm(vision, text, **settings):
    return {"vision_config": vision, "text_config": text, **settings}


#: The class of each family's models, and the settings that make it tiny.
RELEASED = {
    "Llama 3": ("LlamaForCausalLM", TEXT),
    "Qwen2.5": ("Qwen2ForCausalLM", TEXT),
    "Qwen3": ("Qwen3ForCausalLM", TEXT),
    "Gemma 3 text": ("Gemma3ForCausalLM", TEXT),
    "Ministral 3": ("Ministral3ForCausalLM", TEXT),
    "Phi-4": ("Phi3ForCausalLM", TEXT),
    "GLM-4": ("Glm4ForCausalLM", TEXT),
    "Granite": ("GraniteForCausalLM", TEXT),
    "OLMo 2": ("Olmo2ForCausalLM", TEXT),
    "OLMo 3": ("Olmo3ForCausalLM", TEXT),
    "SmolLM3": ("SmolLM3ForCausalLM", TEXT),
    "Mixtral": ("MixtralForCausalLM", EXPERTS),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", EXPERTS),
    "Qwen3-Next": ("Qwen3NextForCausalLM", {**EXPERTS, **LINEAR}),
    "gpt-oss": ("GptOssForCausalLM", EXPERTS),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", DEEPSEEK),
    "GLM-4.5": (
        "Glm4MoeForCausalLM",
        {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1},
    ),
    "Qwen3.5": ("Qwen3_5ForConditionalGeneration", vlm(QWEN_IMAGES, {**TEXT, **LINEAR})),
    "Qwen2.5-VL": ("Qwen2_5_VLForConditionalGeneration", vlm(QWEN_IMAGES, {**TEXT, **SECTIONS})),
    "Qwen3-VL": ("Qwen3VLForConditionalGeneration", vlm(QWEN_IMAGES, {**TEXT, **SECTIONS})),
    "Qwen3-VL-MoE": (
        "Qwen3VLMoeForConditionalGeneration",
        vlm(QWEN_IMAGES, {**EXPERTS, **SECTIONS}),
    ),
    "Gemma 3": ("Gemma3ForConditionalGeneration", vlm(IMAGES, TEXT, mm_tokens_per_image=4)),
    "Gemma 4": ("Gemma4ForConditionalGeneration", vlm(GEMMA_IMAGES, {**TEXT, **LATENT})),
    "Llama 4": (
        "Llama4ForConditionalGeneration",
        vlm(LLAMA4_IMAGES, {**EXPERTS, "intermediate_size_mlp": 48}),
    ),
    "Mistral 3": (
        "Mistral3ForConditionalGeneration",
        vlm({**IMAGES, "model_type": "pixtral"}, {**TEXT, "model_type": "mistral"}),
    ),
    "Phi-4-multimodal": (
        "Phi4MultimodalForCausalLM",
        {**TEXT, "vision_config": {**IMAGES, "crop_size": 28}, "audio_config": PHI_SOUNDS},
    ),
    "InternVL 3": (
        "InternVLForConditionalGeneration",
        vlm(
            {**IMAGES, "image_size": [28, 28], "patch_size": [14, 14]},
            {**TEXT, "model_type": "qwen2"},
        ),
    ),
    "SmolVLM": ("SmolVLMForConditionalGeneration", vlm(IMAGES, {**TEXT, "model_type": "llama"})),
    "PaliGemma": (
        "PaliGemmaForConditionalGeneration",
        vlm(
            {**IMAGES, "model_type": "siglip_vision_model"},
            {**TEXT, "model_type": "gemma"},
            projection_dim=32,
        ),
    ),
    "LLaVA": (
        "LlavaForConditionalGeneration",
        vlm({**IMAGES, "model_type": "clip_vision_model"}, {**TEXT, "model_type": "llama"}),
    ),
    "SigLIP": (
        "SiglipModel",
        vlm(IMAGES, {**TEXT, "max_position_embeddings": 16, "projection_size": 32}),
    ),
    "DINOv3": ("DINOv3ViTModel", IMAGES),
    "ModernBERT": ("ModernBertForMaskedLM", {**TEXT, "cls_token_id": 1, "sep_token_id": 2}),
    "Whisper": ("WhisperForConditionalGeneration", WHISPER),
}


def released(family):
    """Return a tiny model of a family, with random weights that are all different."""
    name, settings = RELEASED[family]
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**settings)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # some are left uninitialised, or at zero
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model
